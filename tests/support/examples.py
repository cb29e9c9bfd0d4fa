"""How many examples a property is tried on: a fifth in the default suite, all in `make campaigns`.

CAMPAIGN_SEED=N gives campaigns other random numbers, and CAMPAIGN_SCALE=N so many times as many tries.
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("few", derandomize=True, database=None, deadline=None, max_examples=20)
settings.register_profile("all", derandomize=True, database=None, deadline=None, max_examples=100)
settings.load_profile("few")  # `--hypothesis-profile=all` comes after; `=default` draws anew

SEED, SCALE = (int(os.environ.get(f"CAMPAIGN_{name}", usual)) for name, usual in (("SEED", "0"), ("SCALE", "1")))


def examples(count: int) -> settings:
    """Of `count` examples, the share that the profile in force asks for."""
    return settings(max_examples=max(1, count * settings().max_examples // 100), deadline=None)
