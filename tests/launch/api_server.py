"""A real kube-apiserver over a real etcd, on free ports of this machine, to be asked whether it takes a manifest.

Neither comes with Python packages. KUBE_APISERVER names the server's binary, ETCD etcd's (else `etcd` of the PATH).
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]
TOKEN = "test-only"
START_WITHIN_S = 120
# What a server of before 1.25, which drops unknown fields without a word, may not know yet.
SINCE_1_27 = ("completionMode", "podFailurePolicy", "suspend", "ttlSecondsAfterFinished", "timeZone")


def binaries() -> tuple[str, str] | None:
    """kube-apiserver and etcd, or None where one of them is not there."""
    server, etcd = os.environ.get("KUBE_APISERVER"), os.environ.get("ETCD") or shutil.which("etcd")
    return (server, etcd) if server and etcd else None


@dataclass
class ApiServer:
    port: int
    minor: int = 0
    _plurals: dict[tuple[str, str], str] = field(
        default_factory=dict
    )  # of what is served: (apiVersion, kind) -> resource

    def ask(self, method: str, path: str, body: Manifest | None = None) -> tuple[int, Manifest]:
        """HTTP status and answer."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"https://127.0.0.1:{self.port}{path}", data, headers, method=method)
        try:
            with urllib.request.urlopen(request, context=ssl._create_unverified_context(), timeout=60) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            text = error.read().decode()
            return error.code, json.loads(text) if text.startswith("{") else {"message": text}

    def kubeconfig(self) -> Manifest:
        """What kubectl, and every client, needs in order to reach the server."""
        cluster = {"server": f"https://127.0.0.1:{self.port}", "insecure-skip-tls-verify": True}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": TOKEN}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        }

    def try_out(self, manifest: Manifest) -> tuple[int, Manifest]:
        """Create it by dryRun=All: all of the server's own validation, and nothing is kept."""
        namespace = manifest["metadata"].get("namespace", "default")
        # Servers from 1.25 on refuse unknown fields; older ones leave them out, which `left_out` finds.
        query = "dryRun=All&fieldValidation=Strict"
        return self.ask("POST", f"{_group(manifest)}/namespaces/{namespace}/{self._plural(manifest)}?{query}", manifest)

    def serves(self, manifest: Manifest) -> bool:
        return self._plural(manifest) != ""

    def _plural(self, manifest: Manifest) -> str:
        """Under which name the server has such objects; empty where it has none."""
        key = (manifest["apiVersion"], manifest["kind"])
        if key not in self._plurals:
            resources = self.ask("GET", _group(manifest))[1].get("resources", [])
            names = (each["name"] for each in resources if each["kind"] == manifest["kind"] and "/" not in each["name"])
            self._plurals[key] = next(names, "")
        return self._plurals[key]

    def create(self, manifest: Manifest, path: str) -> None:
        """For good, unless it is there."""
        status, answer = self.ask("POST", path, manifest)
        assert status in (201, 409), answer

    def install(self, crd_file: Path) -> None:
        """A CustomResourceDefinition, and wait until its kind is served."""
        crd = yaml.load(crd_file.read_text(), yaml.CSafeLoader)
        if self.minor < 25:
            crd = _with_texts_as_defaults(crd)
        status, answer = self.ask("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
        assert status == 201, answer["message"][:2000]
        group, version = crd["spec"]["group"], crd["spec"]["versions"][0]["name"]
        path = f"/apis/{group}/{version}/namespaces/default/{crd['spec']['names']['plural']}"
        _wait(lambda: self.ask("GET", path)[0] == 200, f"{path} is not served")


def _group(manifest: Manifest) -> str:
    version = manifest["apiVersion"]
    return f"/apis/{version}" if "/" in version else f"/api/{version}"


def _with_texts_as_defaults(value: Any) -> Any:
    """Old servers read `default: ""`, as newer generators of definitions write it, as null, and refuse that."""
    if isinstance(value, dict):
        inner = {key: _with_texts_as_defaults(inner) for key, inner in value.items()}
        return {**inner, "default": "none"} if inner.get("default") == "" else inner
    if isinstance(value, list):
        return [_with_texts_as_defaults(inner) for inner in value]
    return value


def left_out(sent: Any, kept: Any, path: str = "") -> list[str]:
    """The keys of `sent` that the server did not know, and so left out."""
    if isinstance(sent, dict) and isinstance(kept, dict):
        inner = [(key, value, kept.get(key)) for key, value in sent.items()]
        missing = [
            f"{path}.{key}" for key, value, other in inner if other is None and value not in (None, "", [], {}, 0)
        ]
        return missing + [
            found
            for key, value, other in inner
            if other is not None
            for found in left_out(value, other, f"{path}.{key}")
        ]
    if isinstance(sent, list) and isinstance(kept, list):
        # The server may add entries, a toleration for instance, and does so at the end.
        return [found for value, other in zip(sent, kept) for found in left_out(value, other, f"{path}[]")]  # noqa: B905
    return []


def assert_accepted(api: ApiServer, manifest: Manifest) -> Manifest:
    """What the server made of it. An old one gets a CronJob as batch/v1beta1, which is all that it has."""
    if manifest["kind"] == "CronJob" and api.minor < 21:
        manifest = {**manifest, "apiVersion": "batch/v1beta1"}
    status, answer = api.try_out(manifest)
    assert status == 201, f"{manifest['kind']}: {answer['message'][:2000]}"
    unknown = {path.rpartition(".")[2] for path in left_out(manifest, answer)}
    allowed = set(SINCE_1_27) if api.minor < 25 else set()
    assert unknown <= allowed, f"{manifest['kind']}: the server does not know {sorted(unknown - allowed)}"
    left = f", without {', '.join(sorted(unknown))}" if unknown else ""
    print(f"1.{api.minor} takes {manifest['apiVersion']} {manifest['kind']}{left}")
    return answer


@contextmanager
def api_server(folder: Path) -> Iterator[ApiServer]:
    """Both processes run until the block ends."""
    found = binaries()
    assert found is not None
    server_binary, etcd_binary = found
    etcd_port, peer_port, port = _free_ports(3)
    etcd_url, peer_url = f"http://127.0.0.1:{etcd_port}", f"http://127.0.0.1:{peer_port}"
    etcd = [
        etcd_binary, "--data-dir", str(folder / "etcd"), "--listen-client-urls", etcd_url, "--advertise-client-urls", etcd_url,
        "--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url, "--initial-cluster", f"default={peer_url}",
    ]  # fmt: skip
    key = folder / "service-account.key"
    subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
    (folder / "tokens").write_text(f'{TOKEN},admin,1,"system:masters"\n')
    server = [
        server_binary, f"--etcd-servers={etcd_url}", "--bind-address=127.0.0.1", f"--secure-port={port}",
        f"--cert-dir={folder / 'certificates'}", f"--token-auth-file={folder / 'tokens'}", "--authorization-mode=RBAC",
        "--service-cluster-ip-range=10.0.0.0/24", "--service-account-issuer=https://127.0.0.1",
        f"--service-account-signing-key-file={key}", f"--service-account-key-file={key}",
        "--disable-admission-plugins=ServiceAccount",
    ]  # fmt: skip
    started: list[subprocess.Popen[bytes]] = []
    try:
        for command in (etcd, server):
            with open(folder / f"{Path(command[0]).name}.log", "wb") as log:
                started.append(subprocess.Popen(command, stdout=log, stderr=log))
        api = ApiServer(port)
        _wait(lambda: _is_ready(api, started), f"kube-apiserver did not start; {folder} has its log")
        api.minor = int(api.ask("GET", "/version")[1]["minor"].rstrip("+"))
        yield api
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(30)


def _is_ready(api: ApiServer, started: list[subprocess.Popen[bytes]]) -> bool:
    assert all(process.poll() is None for process in started), "a process ended at once; its log says why"
    try:
        return api.ask("GET", "/api/v1/namespaces/default")[0] == 200
    except OSError:
        return False


def _wait(condition: Any, what: str) -> None:
    until = time.monotonic() + START_WITHIN_S
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
