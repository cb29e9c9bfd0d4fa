"""Turn a verb and its overrides into an AppDef: one process, or an agent with its ranks on every node.

Kept out of components.py, where TorchX takes every function for a component.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Optional

import torchx
from torchx import specs
from torchx.specs import macros

from launch.resources import host_resource, parse_shape, threads_per_rank
from pipeline.config import (
    EvaluateJob,
    PlanJob,
    PrepareJob,
    TrainJob,
    load_saved_job,
    main,
    print_user_errors,
    validate_evaluation,
)
from pipeline.training.config import TrainerConfig

RDZV_PORT = 29500


@dataclass(frozen=True)
class Where:
    """What a component is told about where to run; None: as on this machine."""

    j: str = "1x1"
    cpu: Optional[int] = None
    gpu: Optional[int] = None
    memMB: Optional[int] = None
    h: Optional[str] = None
    env: Optional[dict[str, str]] = None
    image: Optional[str] = None
    name: Optional[str] = None
    max_retries: int = 0
    max_restarts: int = 0


def train_app(doc: Optional[str], overrides: Iterable[str], where: Where, check_data: bool) -> specs.AppDef:
    words = list(overrides)
    with print_user_errors():
        job = main(TrainJob, _without_args(doc), _as_composed_by_ranks(words, where), check_data)
        return _ranks("train", words, where, job.name, f"{job.run_dir}/logs", job.trainer.grace_s)


def evaluate_app(doc: Optional[str], overrides: Iterable[str], where: Where, check_data: bool) -> specs.AppDef:
    words = list(overrides)
    with print_user_errors():
        job = main(EvaluateJob, _without_args(doc), _as_composed_by_ranks(words, where))
        grace_s = TrainerConfig().grace_s
        if check_data:
            trained = load_saved_job(TrainJob, f"{job.run}/config.yaml")
            validate_evaluation(job, trained, job.world_size)
            grace_s = trained.trainer.grace_s
        return _ranks("evaluate", words, where, "evaluate", f"{job.run}/logs", grace_s)


def prepare_app(doc: Optional[str], overrides: Iterable[str], where: Where) -> specs.AppDef:
    words = list(overrides)
    job = main(PrepareJob, _without_args(doc), words)
    return _single("prepare", words, where, f"prepare-{job.data.name}")


def plan_app(doc: Optional[str], overrides: Iterable[str], where: Where, check_data: bool) -> specs.AppDef:
    words = list(overrides)
    job = main(PlanJob, _without_args(doc), words, check_data)
    return _single("plan", words, where, f"plan-{job.name}")


def _without_args(doc: Optional[str]) -> str:
    """A component's docstring less what TorchX reads in it."""
    return (doc or "").partition("Args:")[0]


def _as_composed_by_ranks(words: list[str], where: Where) -> list[str]:
    """The overrides with the world size that the launcher will set. Raises ValueError where they name another."""
    nodes, ranks = parse_shape(where.j)
    for word in words:
        name, _, value = word.partition("=")
        if name.lstrip("+") == "world_size" and value != str(nodes * ranks):
            raise ValueError(
                f"{word}, but -j {where.j} starts {nodes * ranks} rank(s); leave world_size out, or change -j"
            )
    return [*words, f"world_size={nodes * ranks}"]


def _ranks(verb: str, words: list[str], where: Where, name: str, log_dir: str, grace_s: float) -> specs.AppDef:
    nodes, ranks = parse_shape(where.j)
    resource = host_resource(where.cpu, where.gpu, where.memMB, where.h)
    # Rank 0's output goes to the console, every rank's to its file; a URI is no folder for them.
    logs = [] if "://" in log_dir else ["--log-dir", *_literally([log_dir])]
    command = [
        *("--nnodes", str(nodes), "--nproc-per-node", str(ranks), "--max-restarts", str(where.max_restarts)),
        *("--rdzv-backend", "c10d", "--rdzv-id", macros.app_id),
        *("--tee", "3", "--local-ranks-filter", "0", *logs, "--role", ""),
        *("-m", f"pipeline.{verb}", *_literally(words)),
    ]
    # The first node's name is known when the job runs, so a shell expands it; `$$` is TorchX's way to write `$`.
    # Port 0 on a single node: a free one, so that jobs can share a machine.
    endpoint = f"$${{{macros.rank0_env}:=localhost}}:{RDZV_PORT}" if nodes > 1 else "localhost:0"
    # Our agent: torchrun with exit codes that a scheduler can act on.
    agent = ["-m", "pipeline.agent", "--grace-s", f"{grace_s:g}"]
    run = ["exec", shlex.quote(_python(where)), *agent, "--rdzv-endpoint", endpoint]
    role = specs.Role(
        name=verb,
        image=where.image or torchx.IMAGE,
        entrypoint="bash",
        args=["-c", " ".join([*run, *map(shlex.quote, command)])],
        env={"OMP_NUM_THREADS": str(threads_per_rank(resource, ranks)), "LOGLEVEL": "WARNING", **(where.env or {})},
        num_replicas=nodes,
        max_retries=where.max_retries,
        resource=resource,
        port_map={"c10d": RDZV_PORT},
    )
    return specs.AppDef(name=_app_name(where.name or name), roles=[role])


def _single(verb: str, words: list[str], where: Where, name: str) -> specs.AppDef:
    role = specs.Role(
        name=verb,
        image=where.image or torchx.IMAGE,
        entrypoint=_python(where),
        args=["-u", "-m", f"pipeline.{verb}", *_literally(words)],
        env=dict(where.env or {}),
        max_retries=where.max_retries,
        resource=host_resource(where.cpu, where.gpu, where.memMB, where.h),
    )
    return specs.AppDef(name=_app_name(where.name or name), roles=[role])


def _literally(words: list[str]) -> list[str]:
    """TorchX substitutes `${...}` in arguments: doubled, a `$` reaches the verb as it was typed and validated."""
    return [word.replace("$", "$$") for word in words]


def _python(where: Where) -> str:
    """An image has its own `python`; without one the job runs in this environment, activated or not."""
    return "python" if where.image else sys.executable


def _app_name(name: str) -> str:
    """Lower-case letters, digits and dashes, at most 50: what every scheduler takes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:50] or "job"
