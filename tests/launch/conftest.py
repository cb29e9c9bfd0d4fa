"""A Slurm cluster and an installation of this checkout, for the tests of the launcher."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.installed import installed_under
from tests.launch.launching import Launch
from tests.launch.slurm_cluster import Cluster, cluster, why_not


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    with cluster() as made:
        yield made


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which TorchX finds this checkout's components, schedulers and commands."""
    return installed_under(tmp_path_factory.mktemp("installed"))


@pytest.fixture
def launch(slurm: Cluster, tmp_path: Path, installed: dict[str, str], prepared_clicks: str) -> Launch:
    return Launch(slurm, tmp_path, installed, prepared_clicks)
