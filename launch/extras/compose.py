"""Render a chain for one host as a file of Docker Compose, with an S3 storage.

Credentials of the storage come from the environment or an .env file. The file contains no
credentials.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from launch.manifest import given, to_yaml
from launch.options import option
from launch.resources import on_cluster
from launch.targets import Target, register
from launch.workload import Stage, check_one_task
from pipeline.runtime.errors import LaunchError, check_within

STORAGE, BUCKET = "storage", "bucket"
KEY = {
    "AWS_ACCESS_KEY_ID": "${STORAGE_USER:?set STORAGE_USER}",
    "AWS_SECRET_ACCESS_KEY": "${STORAGE_PASSWORD:?set STORAGE_PASSWORD}",
}


@dataclass(frozen=True)
class ComposeOptions:
    bucket: str = option("pipeline", "bucket to create in the storage: s3://BUCKET/...")
    storage_image: str = option("minio/minio:RELEASE.2025-04-22T22-12-26Z", "image of a storage with the S3 protocol")
    client_image: str = option("minio/mc:RELEASE.2025-04-16T18-13-26Z", "image that creates the bucket")
    workdir: str = option("/workspace", "working folder of the stages, on a separate volume")
    port: int = option(8080, "port of this host for the server")

    def __post_init__(self) -> None:
        check_within("--port", self.port, 1, 65535)


def render_compose(name: str, stages: list[Stage], options: ComposeOptions) -> str:
    """Return YAML for `docker compose up`. Raises LaunchError."""
    services: dict[str, Any] = {STORAGE: _storage(options), BUCKET: _bucket(options)}
    for stage in stages:
        if stage.name in services:
            raise LaunchError(
                f"stages.{stage.name}: a service of this name exists already; give the stage "
                "another name, and set verb:"
            )
        services[stage.name] = _service(stage, options)
    comment = f"{name}: {' -> '.join(stage.name for stage in stages)}. Set STORAGE_USER and STORAGE_PASSWORD (an .env file next to this file)."
    file = {"name": name, "services": services, "volumes": {"workspace": {}, "registry": {}, "storage": {}}}
    return to_yaml([file], comment)


def _storage(options: ComposeOptions) -> dict[str, Any]:
    keys = {"MINIO_ROOT_USER": KEY["AWS_ACCESS_KEY_ID"], "MINIO_ROOT_PASSWORD": KEY["AWS_SECRET_ACCESS_KEY"]}
    return {
        "image": options.storage_image,
        "command": ["server", "/data"],
        "environment": keys,
        "volumes": ["storage:/data"],
        "healthcheck": {"test": ["CMD", "mc", "ready", "local"], "interval": "5s", "timeout": "5s", "retries": 12},
        "restart": "unless-stopped",
    }


def _bucket(options: ComposeOptions) -> dict[str, Any]:
    make = f'mc alias set here http://{STORAGE}:9000 "$$USER_NAME" "$$PASSWORD" && mc mb --ignore-existing here/{options.bucket}'
    return {
        "image": options.client_image,
        "entrypoint": ["sh", "-c", make],
        "environment": {"USER_NAME": KEY["AWS_ACCESS_KEY_ID"], "PASSWORD": KEY["AWS_SECRET_ACCESS_KEY"]},
        "depends_on": {STORAGE: {"condition": "service_healthy"}},
        "restart": "no",
    }


def _service(stage: Stage, options: ComposeOptions) -> dict[str, Any]:
    workload = on_cluster(stage.workload)
    check_one_task(workload, "Compose")
    if workload.image is None:
        raise LaunchError(
            f"stages.{stage.name}: set an image (defaults: image: ...); docs/do/cluster.md says how to build it"
        )
    if workload.nodes > 1:
        raise LaunchError(f"stages.{stage.name}: j={workload.shape}, but compose has one host")
    store = {"AWS_ENDPOINT_URL": f"http://{STORAGE}:9000", "AWS_DEFAULT_REGION": "us-east-1", **KEY}
    env = {name: value.replace("$", "$$") for name, value in workload.env.items()}
    waits = {name: {"condition": "service_completed_successfully"} for name in stage.after or (BUCKET,)}
    device = {"driver": "nvidia", "count": workload.gpu, "capabilities": ["gpu"]}
    return given(
        image=workload.image,
        command=[word.replace("$", "$$") for word in workload.argv("localhost", workload.name)],
        working_dir=options.workdir,
        environment=replace(workload, env=env).whole_env(workload.ranks_per_node, store),
        volumes=[
            f"workspace:{options.workdir}",
            "registry:/registry",
            *(_mount(stage, mount.source, mount.target, mount.read_only) for mount in workload.mounts),
        ],
        depends_on=waits,
        cpus=workload.cpu or None,
        mem_limit=f"{workload.mem_mb}m" if workload.mem_mb else "",
        shm_size=f"{workload.mem_mb // 2}m" if workload.mem_mb else "1g",
        init=True,  # otherwise the process is number 1, which ignores SIGTERM by default
        stop_grace_period=f"{int(workload.grace_s) + 5}s",
        deploy={"resources": {"reservations": {"devices": [device]}}} if workload.gpu else {},
        ports=[f"{options.port}:{workload.http_port}"] if stage.is_service else [],
        healthcheck=_health(workload.http_port) if stage.is_service else {},
        restart="unless-stopped"
        if stage.is_service
        else f"on-failure:{workload.max_retries}"
        if workload.max_retries
        else "no",
    )


def _mount(stage: Stage, source: str, target: str, read_only: bool) -> str:
    if not source.startswith(("/", "./")):
        raise LaunchError(
            f"stages.{stage.name}: mount src={source}: give a folder of this host as a path that begins with / or ./"
        )
    return f"{source}:{target}{':ro' if read_only else ''}"


def _health(port: int) -> dict[str, Any]:
    ask = f"import urllib.request; urllib.request.urlopen('http://localhost:{port}/health/ready', timeout=3)"
    often = {"interval": "10s", "timeout": "5s", "retries": 6, "start_period": "600s"}
    return {"test": ["CMD", "python", "-c", ask], **often}


register("chain", "compose", Target(ComposeOptions, render_compose))
