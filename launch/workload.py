"""Describe what a node runs on any scheduler: a verb, its overrides, its resources.

The job is composed and validated here, without torch. launch.appdef makes a TorchX AppDef from a
Workload, launch.slurm an sbatch script, launch.kubernetes manifests, launch.render a command line.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Optional

from launch.options import option
from launch.resources import asked_host, on_hardware, parse_elastic_shape, parse_shape, with_hardware
from pipeline.cli.command_line import (
    check_geometry,
    check_world_sizes,
    has_dataset,
    parse_command_line,
    print_user_errors,
    validate_evaluation,
    validate_train,
)
from pipeline.config.jobs.evaluate import EvaluateJob, ExportJob, PredictJob, ServeJob
from pipeline.config.jobs.prepare import CheckNodesJob, PrepareJob
from pipeline.config.jobs.retrain import RetrainJob
from pipeline.config.jobs.train import PlanJob, TrainJob
from pipeline.config.planner import HardwareConfig
from pipeline.config.saved_jobs import load_saved_job
from pipeline.config.training import TrainerConfig
from pipeline.runtime.errors import LaunchError, TrainingError
from pipeline.runtime.masking import SECRET_NAME, mask

RDZV_PORT = 29500
MOUNT_TYPES = ("bind", "volume", "device")

# Words of a command that only the place can fill in. They have not the form key=value, so no
# override equals them.
ENDPOINT = "<rendezvous host:port>"
JOB_ID = "<job id>"

MEETINGS = ".meetings"  # folder in the run folder for agents whose nodes leave and join

RAY_NODE = "pipeline.extras.ray_prepare.node"

RESUMABLE = ("prepare", "train", "retrain", "predict")  # verbs that keep their work after a SIGTERM


@dataclass(frozen=True)
class Mount:
    """A mount of `source` (a path on the host, or a volume's name) at `target` in the container."""

    kind: str
    source: str
    target: str
    read_only: bool = False


@dataclass(frozen=True)
class Where:
    """Resources and place of a job. None means: as on this machine, or as the scheduler decides."""

    j: str = option("1x1", "NODESxRANKS_PER_NODE, for instance 2x8; train also accepts MIN:MAXxRANKS, such as 2:4x8")
    cpu: Optional[int] = option(None, "cores a node")
    gpu: Optional[int] = option(None, "GPUs per node; 0: the ranks run on CPUs")
    memMB: Optional[int] = option(None, "memory a node")
    h: Optional[str] = option(None, "a named host that sets cpu, gpu and memMB: h100_80gb_x8, ...")
    env: Optional[dict[str, str]] = option(None, "environment of the job; repeatable")
    image: Optional[str] = option(None, "container image; default: the job runs in this Python environment")
    mount: Optional[str] = option(None, "type=bind,src=/data,dst=/data,readonly; several are joined by commas")
    name: Optional[str] = option(None, "name of the job; default: the run's name")
    max_retries: int = option(0, "how often the scheduler may restart the job after a failure")
    max_restarts: int = option(3, "how often the ranks are restarted on their hosts after a rank dies or hangs")


@dataclass(frozen=True)
class Workload:
    """What a node runs: one process, or one agent that starts `ranks_per_node` ranks.

    cpu, gpu and mem_mb are per node. 0 cores, 0 MB or None mean: not specified, the scheduler
    decides.
    """

    verb: str
    name: str  # [a-z0-9-], at most 50 characters
    nodes: int
    ranks_per_node: int
    command: list[str]  # of one node; argv() and shell_line() fill in ENDPOINT and JOB_ID
    env: dict[str, str] = field(default_factory=dict)
    cpu: int = 0
    gpu: Optional[int] = None
    mem_mb: int = 0
    image: Optional[str] = None
    mounts: list[Mount] = field(default_factory=list)
    max_retries: int = 0
    grace_s: float = 0.0  # seconds that the ranks need after SIGTERM; 0: the verb saves nothing
    log_dir: str = ""  # each rank writes a file here; empty: there are no ranks or no folder
    device: str = ""  # of the ranks: cuda, cpu, or auto (only the node knows); empty: no ranks
    hardware: str = ""  # the preset's name
    reads: tuple[str, ...] = ()  # inputs of a verb without ranks, as typed
    http_port: int = 0  # of a server
    tasks: int = 1  # of an array: the command runs this many times, each with another number
    steps: str = ""  # the local folder of its checkpoints; empty: none, or in an object store
    on_ray: bool = False  # nodes of a Ray cluster that ends with the job
    # minimum if nodes may be lost; `nodes` is then the maximum. 0: all nodes are required
    min_nodes: int = 0

    @property
    def is_distributed(self) -> bool:
        """Return True if the job has ranks that must connect. False means one process."""
        return ENDPOINT in self.command or self.is_elastic

    @property
    def shape(self) -> str:
        """Return the shape in the format of -j."""
        least = f"{self.min_nodes}:" if self.is_elastic else ""
        return f"{least}{self.nodes}x{self.ranks_per_node}"

    @property
    def is_elastic(self) -> bool:
        """Return whether nodes may leave and join. They then connect through a folder."""
        return self.min_nodes > 0

    def argv(self, host: str = "localhost", job_id: str = "none") -> list[str]:
        """Return the command line. `host` replaces the head node, `job_id` the scheduler's job id."""
        known = {ENDPOINT: f"{host}:{self.port}", JOB_ID: job_id}
        return [known.get(word, word) for word in self.command]

    def shell_words(self, host: str = "localhost", job_id: str = "none", port: Optional[str] = None) -> list[str]:
        """Return the command line as quoted words. The shell expands host, job_id and port."""
        known = {ENDPOINT: f'"{host}:{self.port if port is None else port}"', JOB_ID: f'"{job_id}"'}
        return [known.get(word) or shlex.quote(word) for word in self.command]

    def shell_line(self, host: str = "localhost", job_id: str = "none") -> str:
        return " ".join(self.shell_words(host, job_id))

    @property
    def port(self) -> int:
        """Return the rendezvous port. On a single node it is 0 (a free port), so that jobs can share the node."""
        return RDZV_PORT if self.nodes > 1 else 0

    @property
    def is_resumable(self) -> bool:
        """Return True if the job continues when the same command is run again after a SIGTERM."""
        return self.verb in RESUMABLE

    def threads(self, default_cpu: int) -> int:
        """Return OMP_NUM_THREADS, an equal share of the cores. By default torch uses all cores in every rank."""
        return max(1, (self.cpu or default_cpu) // self.ranks_per_node)

    def whole_env(self, default_cpu: int, more: Optional[dict[str, str]] = None) -> dict[str, str]:
        """Return the job's environment, including the variables `more` and the number of threads of each rank."""
        ranks = {"OMP_NUM_THREADS": str(self.threads(default_cpu)), "LOGLEVEL": "WARNING"}
        return {**(ranks if self.is_distributed else {}), **(more or {}), **self.env}


def _validate_here(job: TrainJob) -> None:
    """Validate the job. Raises UserError; if the data set is missing, it says how to skip this check."""
    try:
        validate_train(job)
    except TrainingError as error:
        if has_dataset(job):
            raise
        raise LaunchError(
            f"{error}; if only the cluster can read data.path={job.data.path}, give "
            "--no-check-data (torchx: --check_data False)"
        ) from None


def _validate_unseen(job: TrainJob) -> None:
    """Check what needs no data set, and print on stderr what was not checked. Raises UserError."""
    check_geometry(job, job.world_size)
    print(
        f"data.path={job.data.path} was not checked from this machine; the job checks it when it starts",
        file=sys.stderr,
    )


def train(doc: Optional[str], words: list[str], where: Where, check_data: bool = True) -> Workload:
    words = with_hardware(words, where)
    least, nodes, ranks = parse_elastic_shape(where.j)
    where = replace(where, j=f"{nodes}x{ranks}")

    def validate(job: TrainJob) -> None:
        if least < nodes:
            check_world_sizes(job, [number * ranks for number in range(least, nodes + 1)])
        (_validate_here if check_data else _validate_unseen)(job)

    job = parse_command_line(TrainJob, doc, _as_composed_by_ranks(words, where), validate)
    made = _ranks("train", words, where, job.name, f"{job.run_dir}/logs", job.trainer.grace_s)
    if least < nodes:
        made = _elastic(made, least, f"{job.run_dir}/{MEETINGS}")
    # Each task of an array has a separate run folder, whose name is only known when the task runs.
    varies = any("oc.env:" in word for word in words)
    steps = job.checkpoint.folder or f"{job.run_dir}/checkpoints"
    return on_hardware(replace(made, steps="" if varies or "://" in steps else steps), where, job.hardware)


def _elastic(workload: Workload, least: int, folder: str) -> Workload:
    """Return options so that agents connect through the run folder, and do not depend on any single node."""
    meets = {
        "--rdzv-endpoint": folder,
        "--nnodes": f"{least}:{workload.nodes}",
        "--rdzv-backend": "folder",  # of pipeline.runtime.process.file_rendezvous
    }
    words = [meets.get(flag, word) for flag, word in zip(["", *workload.command], workload.command, strict=False)]
    return replace(workload, command=words, min_nodes=least)


def evaluate(doc: Optional[str], words: list[str], where: Where, check_data: bool = True) -> Workload:
    job = parse_command_line(EvaluateJob, doc, _as_composed_by_ranks(words, where))
    grace_s, trained = TrainerConfig().grace_s, None
    if check_data:
        trained = load_saved_job(TrainJob, f"{job.run}/config.yaml")
        validate_evaluation(job, trained, job.world_size)
        grace_s = trained.trainer.grace_s
    made = _ranks("evaluate", words, where, "evaluate", f"{job.run}/logs", grace_s)
    return on_hardware(made, where, trained.hardware if trained else HardwareConfig())


def prepare(doc: Optional[str], words: list[str], where: Where, check_data: bool = True) -> Workload:
    """Prepare data in one process, or with engine=ray on a Ray cluster of the job's nodes."""
    job = parse_command_line(PrepareJob, doc, words)
    name = f"prepare-{job.data.name}"
    if job.engine != "ray":
        if parse_shape(where.j) != (1, 1):
            raise LaunchError(f"-j {where.j}: prepare is one process; remove -j, or give engine=ray for many machines")
        return _single("prepare", words, where, name, job.source or "")
    nodes, processes = parse_shape(where.j)
    if processes != 1:
        raise LaunchError(f"-j {where.j}: engine=ray starts as many tasks as fit on a node; give -j {nodes}x1")
    if job.ray.address is not None:
        raise LaunchError(f"ray.address={job.ray.address}: the job starts a separate cluster; remove ray.address")
    memory = ["--memory-mb", str(where.memMB)] if where.memMB else []
    dashboard = ["--dashboard"] if job.ray.dashboard else []
    command = [_python(where), "-m", RAY_NODE, "--address", ENDPOINT, *memory, *dashboard, "--", *words]
    return replace(_placed(Workload("prepare", _app_name(where.name or name), nodes, 1, command), where), on_ray=True)


def plan(doc: Optional[str], words: list[str], where: Where, check_data: bool = True) -> Workload:
    job = parse_command_line(PlanJob, doc, words, validate_train if check_data else None)
    return _single("plan", words, where, f"plan-{job.name}")


def export(doc: Optional[str], words: list[str], where: Where, check_data: bool = True) -> Workload:
    job = parse_command_line(ExportJob, doc, words)
    if check_data:
        load_saved_job(TrainJob, f"{job.run}/config.yaml")
    return _single("export", words, where, "export", job.run)


# The number of this task. Slurm's arrays and Kubernetes' Indexed Jobs set it in the environment.
TASK_NUMBER = "${oc.env:SLURM_ARRAY_TASK_ID,${oc.env:JOB_COMPLETION_INDEX,0}}"


def predict(doc: Optional[str], words: list[str], where: Where, check_data: bool = True) -> Workload:
    """Predict in one process, or with num_shards=N in an array of N processes."""
    job = parse_command_line(PredictJob, doc, words)
    if job.num_shards > 1:
        if any(word.partition("=")[0] == "shard" for word in words):
            raise LaunchError("shard=... with num_shards: each task of the array gets its shard; remove shard")
        words = [*words, f'shard="{TASK_NUMBER}"']
    stem = job.output.rstrip("/").rpartition("/")[2].partition(".")[0]
    made = _single("predict", words, where, f"predict-{stem}", job.artifact, job.source)
    return replace(made, tasks=job.num_shards)


def check_one_task(workload: Workload, what: str) -> None:
    """Raise LaunchError if the job is an array, or if its nodes may leave and join."""
    if workload.is_elastic:
        raise LaunchError(
            f"-j {workload.shape}: with {what} a lost node does not return; give -j "
            f"{workload.nodes}x{workload.ranks_per_node}, or use Slurm, or Kubernetes with --kind job"
        )
    if workload.tasks > 1:
        raise LaunchError(
            f"num_shards={workload.tasks} is an array of tasks, which {what} does not support; "
            "use Slurm's arrays or Kubernetes' Jobs"
        )


def retrain(doc: Optional[str], words: list[str], where: Where, check_data: bool = True) -> Workload:
    words = with_hardware(words, where)
    job = parse_command_line(RetrainJob, doc, _as_composed_by_ranks(words, where))
    made = _ranks("retrain", words, where, f"retrain-{job.name}", f"{job.run_dir}/logs", job.trainer.grace_s)
    return on_hardware(made, where, job.hardware)


def check_nodes(doc: Optional[str], words: list[str], where: Where, check_data: bool = True) -> Workload:
    job = parse_command_line(CheckNodesJob, doc, words)
    made = _ranks("check_nodes", words, where, "check-nodes", "", TrainerConfig().grace_s)
    # gloo also measures nodes with GPUs
    device = {"nccl": "cuda", "auto": "auto"}.get(job.backend, "")
    return replace(made, device=device, hardware=f"backend={job.backend}")


def serve(doc: Optional[str], words: list[str], where: Where, check_data: bool = True) -> Workload:
    """Run a server on all network interfaces. After SIGTERM it answers until load balancers have noticed."""
    given = {word.partition("=")[0] for word in words}
    defaults = {"server.host": "0.0.0.0", "server.shutdown_delay_s": "5"}
    if cores := asked_host(where.cpu, where.gpu, where.memMB, where.h).cpu:
        defaults["threads"] = str(cores)  # torch would start one thread per core of the node
    words = [*words, *(f"{key}={value}" for key, value in defaults.items() if key not in given)]
    job = parse_command_line(ServeJob, doc, words)
    made = _single("serve", words, where, "serve-" + job.artifact.rstrip("/").rpartition("/")[2], job.artifact)
    grace_s = job.server.shutdown_delay_s + job.server.drain_s
    return replace(made, http_port=job.server.port, grace_s=grace_s)


WORKLOADS: dict[str, Callable[[Optional[str], list[str], Where, bool], Workload]] = {
    "prepare": prepare, "plan": plan, "train": train, "evaluate": evaluate, "export": export, "retrain": retrain,
    "predict": predict, "check_nodes": check_nodes,
}  # fmt: skip


SERVICES = {"serve": serve}  # verbs that run until they are stopped


@dataclass(frozen=True)
class Stage:
    """A stage of a chain, and the names of the stages that must succeed before it starts."""

    name: str
    workload: Workload
    after: tuple[str, ...] = ()

    @property
    def is_service(self) -> bool:
        """Return True if the stage runs until it is stopped. Then no other stage can wait for its end."""
        return self.workload.verb in SERVICES


def make_workload(
    verb: str, doc: Optional[str], overrides: Iterable[str], where: Where, check_data: bool = True
) -> Workload:
    """Return the workload of a verb's command line. A UserError ends the process with a message of
    one line.

    check_data: validate the job with its data (a data set, a run folder) from this machine.
    """
    with print_user_errors():
        check_env(where.env or {})
        return (WORKLOADS | SERVICES)[verb](doc, list(overrides), where, check_data)


def check_env(env: dict[str, str]) -> None:
    """Raise LaunchError for a credential, because scripts and manifests show the values."""
    for name, value in env.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise LaunchError(f"env: {name!r} is not a name of an environment variable")
        if SECRET_NAME.search(name) or mask(value) != value:
            raise LaunchError(
                f"env: {name} looks like a credential, and the job's environment is written into "
                "the submitted script or manifest; docs/do/cluster.md explains how to pass "
                "credentials (Slurm: from your shell or env_file, Kubernetes: a Secret)"
            )


def parse_mounts(text: Optional[str]) -> list[Mount]:
    """Parse TorchX's mounts: type=bind,src=/data,dst=/data,readonly; joined by commas."""
    found: list[dict[str, str]] = []
    for word in filter(None, (text or "").split(",")):
        key, _, value = word.partition("=")
        key = {"source": "src", "target": "dst", "destination": "dst"}.get(key, key)
        if key == "type":
            found.append({})
        if key not in ("type", "src", "dst", "readonly", "perm") or not found:
            raise LaunchError(
                f"--mount {text}: {word!r} is not type=, src=, dst= or readonly, with type= first in each"
            )
        found[-1][key] = value
    mounts = [
        Mount(each["type"], each.get("src", ""), each.get("dst", each.get("src", "")), "readonly" in each)
        for each in found
    ]
    for mount in mounts:
        if mount.kind not in MOUNT_TYPES or not mount.source or not mount.target.startswith("/"):
            raise LaunchError(f"--mount {text}: each is type={'|'.join(MOUNT_TYPES)},src=SOURCE,dst=/PATH[,readonly]")
    return mounts


def _as_composed_by_ranks(words: list[str], where: Where) -> list[str]:
    """Return the overrides with the launcher's world size. Raise LaunchError if they set another world size."""
    nodes, ranks = parse_shape(where.j)
    for word in words:
        name, _, value = word.partition("=")
        if name.lstrip("+") == "world_size" and value != str(nodes * ranks):
            raise LaunchError(
                f"{word}, but -j {where.j} starts {nodes * ranks} rank(s); remove world_size, or change -j"
            )
    return [*words, f"world_size={nodes * ranks}"]


def _ranks(verb: str, words: list[str], where: Where, name: str, log_dir: str, grace_s: float) -> Workload:
    nodes, ranks = parse_shape(where.j)
    logs = "" if "://" in log_dir else log_dir  # a URI is not a folder for the ranks' files
    command = [
        # Our agent: torchrun with exit codes that a scheduler can use.
        *(_python(where), "-m", "pipeline", "agent", "--grace-s", f"{grace_s:g}"),
        *("--rdzv-endpoint", ENDPOINT),
        *("--nnodes", str(nodes), "--nproc-per-node", str(ranks), "--max-restarts", str(where.max_restarts)),
        *("--rdzv-backend", "c10d", "--rdzv-id", JOB_ID),
        # Rank 0's output goes to the console, every rank's output to its file.
        *("--tee", "3", "--local-ranks-filter", "0", *(["--log-dir", logs] if logs else []), "--role", ""),
        *("-m", "pipeline", verb, *words),
    ]
    made = Workload(verb, _app_name(where.name or name), nodes, ranks, command, grace_s=grace_s, log_dir=logs)
    return _placed(made, where)


def _single(verb: str, words: list[str], where: Where, name: str, *reads: str) -> Workload:
    if parse_shape(where.j) != (1, 1):
        raise LaunchError(f"-j {where.j}: {verb} is one process; remove -j")
    command = [_python(where), "-u", "-m", "pipeline", verb, *words]
    return _placed(Workload(verb, _app_name(where.name or name), 1, 1, command, reads=reads), where)


def _placed(workload: Workload, where: Where) -> Workload:
    host = asked_host(where.cpu, where.gpu, where.memMB, where.h)
    return replace(
        workload, cpu=host.cpu, gpu=host.gpu, mem_mb=host.mem_mb, image=where.image, env=dict(where.env or {}),
        mounts=parse_mounts(where.mount), max_retries=where.max_retries,
    )  # fmt: skip


def _python(where: Where) -> str:
    """Return `python` for an image, otherwise this interpreter's path: its environment may not be activated."""
    return "python" if where.image else sys.executable


def _app_name(name: str) -> str:
    """Return the name as lower-case letters, digits and dashes, at most 50, which every scheduler accepts."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower())[:50].strip("-") or "job"
