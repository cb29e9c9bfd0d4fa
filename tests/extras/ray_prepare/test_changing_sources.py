"""On Ray, too, a source that changes while it is read is refused by name, or the data set holds one of its states."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.config.jobs.prepare import RayConfig
from pipeline.data.prepare import prepare as prepare_module
from pipeline.data.prepare.run import prepare
from pipeline.data.raw.source import SourceChangedError
from tests.data.test_changing_sources import CHANGES, Moments, job_of, shards_of, states_of, write_sources
from tests.extras.ray_prepare.ray_cluster import ray_cluster

MOMENTS = int(os.environ.get("RAY_MOMENTS", "60"))
pytestmark = pytest.mark.campaign


def test_a_source_that_changes_at_sixty_moments_is_refused_or_read_in_one_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The moments are those of the driver: before a listing is used, between answers of tasks, before the commit."""
    from pipeline.extras.ray_prepare import executor

    steps = [(executor.ray, "wait"), (prepare_module, "check_sources"), (prepare_module, "check_unchanged")]
    changes = [name for name in CHANGES if name != "removed"]
    states = {name: states_of(tmp_path / name, name) for name in changes if not (tmp_path / name).mkdir()}
    counted: Counter[str] = Counter()
    with ray_cluster((2, 0)) as cluster:
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
        wanted = RayConfig(address=cluster.address)
        num_steps = 0
        for number in range(-1, MOMENTS):
            folder = tmp_path / str(number)
            folder.mkdir()
            sources, name = write_sources(folder / "raw"), changes[number % len(changes)]
            job = replace(job_of(sources, folder / "ds"), engine="ray", ray=wanted)
            at = round(number * (num_steps - 1) / max(1, MOMENTS - 1)) if number >= 0 else -1
            with pytest.MonkeyPatch.context() as patch:
                moments = Moments(patch, at, lambda n=name, s=sources: CHANGES[n](s / "day_1.csv"), steps)
                try:
                    prepare(job)
                    counted["read in one state"] += 1
                    assert shards_of(folder / "ds") in states[name]
                except SourceChangedError as error:
                    counted["refused"] += 1
                    assert "day_1.csv" in str(error) and not (folder / "ds" / "dataset.json").exists()
            num_steps = num_steps or moments.count
    print(f"{MOMENTS} moments among {num_steps} of a preparation: {dict(counted)}")
    assert counted.total() == MOMENTS + 1 and counted["refused"] > MOMENTS // 2
