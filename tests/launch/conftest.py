"""A Slurm cluster and an installation of this checkout, for the tests of the launcher."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.api_server import ApiServer, api_server, binaries
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


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    if binaries() is None:
        pytest.skip("no server: KUBE_APISERVER must name kube-apiserver, and ETCD etcd where it is not in the PATH")
    with api_server(tmp_path_factory.mktemp("kubernetes")) as server:
        print(f"kube-apiserver 1.{server.minor}")
        yield server


@pytest.fixture(scope="session")
def published(api: ApiServer) -> ApiServer:
    """The server, with the definitions that other projects publish."""
    folder = os.environ.get("KUBE_CRDS")
    if not folder:
        pytest.skip(
            "KUBE_CRDS names no folder with the CustomResourceDefinitions of JobSet, Volcano, Kubeflow and others"
        )
    for file in sorted(Path(folder).glob("*.yaml")):
        api.install(file)
    return api
