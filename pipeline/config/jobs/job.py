"""What the schema of every job has (stdlib and OmegaConf only)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Job:
    """What every job has. plugins: packages whose import registers components, given on the command line alone.

    A saved job tells by them what it needs; reading it imports none of them.
    """

    plugins: list[str] = field(default_factory=list, kw_only=True)
