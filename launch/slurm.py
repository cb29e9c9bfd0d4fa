"""Render a Workload as a batch script for Slurm: one agent per node starts the ranks.

`torchx run -s slurm` submits this script, and `python -m launch.render slurm` prints it.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Optional

from launch import slurm_jobs
from launch.options import NetworkOptions, option
from launch.resources import CORES_A_RANK, PRESETS, on_cluster
from launch.workload import Workload
from pipeline.runtime.errors import LaunchError
from pipeline.runtime.masking import find_secret
from pipeline.runtime.process.exit_codes import DONE, FINAL, REQUEUE, USER_ERROR

LINE_WIDTH = 110
# between the end of the grace period and the time limit, for the rest of the batch script
AFTER_GRACE_S = 30
MAX_REQUEUES = 100  # of a job that its time limit stops again and again
# starts that may be stopped before they have saved anything, even with few retries
EMPTY_STARTS = 3
# srun lists the options of its plugins. Without this check a container that cannot start would be
# retried.
HAS_CONTAINERS = (
    # grep reads all input, because of pipefail
    "srun --help 2>&1 | grep -e --container-image > /dev/null || "
    f'{{ echo "error: an image needs Slurm\'s plugin pyxis, which is not installed: remove image" >&2; exit {USER_ERROR}; }}'
)
_TIME = re.compile(r"\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2}|UNLIMITED|infinite", re.IGNORECASE)
_ARRAY = re.compile(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?")
_SIGNAL = re.compile(r"(?:(?:SIG)?TERM@)?(\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class SlurmOptions(NetworkOptions):
    """Options of sbatch in addition to the job's shape. Raises LaunchError for refused values."""

    partition: Optional[str] = option(None, "partition to run in")
    account: Optional[str] = option(None, "account that is charged")
    qos: Optional[str] = option(None, "quality of service")
    time: Optional[str] = option(None, "time limit in sbatch's format: minutes, hh:mm:ss or d-hh:mm:ss")
    constraint: Optional[str] = option(None, "features that the nodes must have")
    gres: Optional[str] = option(None, "generic resources per node, for instance gpu:h100:8, instead of plain GPUs")
    comment: Optional[str] = option(None, "comment on the job")
    mail_user: Optional[str] = option(None, "whom to mail")
    mail_type: Optional[str] = option(None, "when to send mail: BEGIN,END,FAIL,REQUEUE,TIME_LIMIT,...")
    signal: Optional[str] = option(None, "TERM@SECONDS before the time limit; default: the job's "
                                         "grace period plus 30")  # fmt: skip
    requeue: bool = option(True, "restart the job after a time limit, a preemption or the loss of a node")
    output: str = option("%x-%j.out", "file for the output (arrays: %x-%A_%a.out); its folder must exist")
    env_file: Optional[str] = option(None, "a shell file that the job reads first (modules, "
                                           "credentials); it is not copied")  # fmt: skip
    array: Optional[str] = option(None, "tasks: 0-3, or 0-99%4 for four at a time; each reads SLURM_ARRAY_TASK_ID")
    sbatch: Optional[str] = option(None, "more options of sbatch, for instance '--reservation=r1 --exclusive'")

    def __post_init__(self) -> None:
        super().__post_init__()
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if isinstance(value, str) and not value.isprintable():
                raise LaunchError(f"{each.name}={value!r}: give one line of text")
        if self.time is not None and not _TIME.fullmatch(self.time):
            raise LaunchError(f"time={self.time} is not a time limit of sbatch: give minutes, hh:mm:ss or d-hh:mm:ss")
        if self.array is not None and not _ARRAY.fullmatch(self.array):
            raise LaunchError(f"array={self.array} names no tasks: give 0-3, 1,5,7 or 0-99%4")
        if self.signal is not None and not _SIGNAL.fullmatch(self.signal):
            raise LaunchError(
                f"signal={self.signal}: ranks save only on TERM; give TERM@SECONDS, for instance TERM@120"
            )
        if key := find_secret(dataclasses.asdict(self)):
            raise LaunchError(f"{key} contains a credential, and Slurm stores the script; put it into an env_file")


def render_sbatch(workload: Workload, options: SlurmOptions) -> str:
    """Return the complete script. Raises LaunchError for a job that could not make progress."""
    if workload.is_elastic:
        options = _a_task_a_node(workload, options)
    elif workload.tasks > 1:
        every = f"0-{workload.tasks - 1}"
        if (options.array or every).partition("%")[0] != every:
            raise LaunchError(
                f"array={options.array}, but num_shards={workload.tasks} has the tasks {every}: remove array, or give "
                f"{every}%8 for eight at once"
            )
        options = replace(options, array=options.array or every)
    workload = placed(workload, options)
    _check_time(workload, options)
    if options.array and workload.steps and not workload.is_elastic:
        raise LaunchError(
            f"array={options.array}: every task would train in the run folder of {workload.steps}; give each task a "
            "separate folder, for instance 'run_dir=\"runs/task${oc.env:SLURM_ARRAY_TASK_ID,0}\"'"
        )
    parts = [
        "#!/bin/bash\n" + "\n".join(f"#SBATCH {line}" for line in sbatch_lines(workload, options)),
        "trap : TERM  # Slurm stops the ranks itself; this script stays to hear how they ended",
        *environment(workload, options),
        "\n".join(_start(workload, options)),
        _ending(workload, options),
    ]
    return "\n\n".join(parts) + "\n"


def _a_task_a_node(workload: Workload, options: SlurmOptions) -> SlurmOptions:
    """Return options for an array with one task per node."""
    if options.array is not None:
        raise LaunchError(
            f"array={options.array}: -j {workload.shape} is an array itself, with a task per node; remove array"
        )
    if not options.requeue:
        raise LaunchError("requeue=False: a lost node would not return; remove it, or give one number of nodes")
    return replace(options, array=f"0-{workload.nodes - 1}")


def placed(workload: Workload, options: SlurmOptions) -> Workload:
    """Return the workload with the requested GPUs and cores of a node. Raises LaunchError."""
    asked = _own_resources(options)
    cards = asked.cards(1 if workload.is_elastic else workload.nodes)
    workload = on_cluster(workload, sum(number for _, number in cards) if cards else None)
    names = {preset.partition("_")[0] for preset in PRESETS.values()}
    for kind, _ in cards:
        card = kind.lower().partition("_")[0]
        if card in names and workload.hardware.partition("_")[0] in names - {card}:
            raise LaunchError(
                f"{kind} GPUs are requested, but the job's hardware is {workload.hardware}: change one of the two"
            )
    if workload.gpu and not workload.cpu and not asked.cores and not slurm_jobs.gives_cores_by_gpu(options.partition):
        return replace(workload, cpu=CORES_A_RANK * workload.ranks_per_node)
    return workload


class _Asked(argparse.Namespace):
    """The options for GPUs and cores, from `gres` and from sbatch's options."""

    gres: list[str]
    node: Optional[str]
    job: Optional[str]
    cores: Optional[str]

    def cards(self, nodes: int) -> list[tuple[str, int]]:
        """Return the type of a node's GPUs ("" if it is not given), and their number."""
        listed = [each.partition(":") for text in self.gres for each in text.split(",")]
        by_gres = [rest or "1" for name, _, rest in listed if name in ("gpu", "gres/gpu")]
        found = [_card(text) for text in by_gres or (self.node or self.job or "").split(",") if text]
        return [
            (kind, -(-number // nodes) if self.job and not (by_gres or self.node) else number) for kind, number in found
        ]


def _card(text: str) -> tuple[str, int]:
    """Parse a GPU request such as 'h100:8', '8', 'h100' or '8(S:0-1)' as Slurm does."""
    kind, _, number = text.partition("(")[0].rpartition(":")
    return (kind, int(number)) if number.isdecimal() else (number, 1)


def _own_resources(options: SlurmOptions) -> _Asked:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--gres", action="append", default=[options.gres] if options.gres else [])
    # there is one task per node
    parser.add_argument("--gpus-per-node", "--gpus-per-task", dest="node")
    parser.add_argument("--gpus", "-G", dest="job")
    parser.add_argument("--cpus-per-task", "-c", "--cpus-per-gpu", dest="cores")
    try:
        return parser.parse_known_args(shlex.split(options.sbatch or ""), _Asked())[0]
    except (argparse.ArgumentError, ValueError) as error:
        raise LaunchError(f"sbatch={options.sbatch}: {error}") from None


def sbatch_lines(workload: Workload, options: SlurmOptions) -> Iterator[str]:
    shape = {"job-name": workload.name, "nodes": 1 if workload.is_elastic else workload.nodes, "ntasks-per-node": 1}
    # With GPUs and no --cpu, the cluster's default of cores per GPU applies, or more options of
    # sbatch.
    if cpus := workload.cpu or (0 if workload.gpu else workload.ranks_per_node):
        shape["cpus-per-task"] = cpus
    if workload.gpu and not _own_resources(options).cards(1):
        shape["gpus-per-node"] = workload.gpu
    if workload.mem_mb:
        shape["mem"] = f"{workload.mem_mb}M"
    named = ("partition", "account", "qos", "time", "constraint", "gres", "comment", "mail_user", "mail_type", "array")
    chosen = {name.replace("_", "-"): value for name in named if (value := getattr(options, name)) is not None}
    yield from (f"--{name}={_quoted(str(value))}" for name, value in (shape | chosen).items())
    if seconds := _signal_s(workload, options):
        yield f"--signal=TERM@{seconds}"
    yield "--requeue" if options.requeue else "--no-requeue"
    is_default = options.array and options.output == SlurmOptions.output
    yield f"--output={_quoted('%x-%A_%a.out' if is_default else options.output)}"
    yield "--open-mode=append"
    yield from shlex.split(options.sbatch or "")


def _quoted(text: str) -> str:
    """Quote text for the #SBATCH lines: text with blanks or special characters gets double quotes."""
    return text if re.fullmatch(r"[\w.,:=@%/+*&|\[\]-]+", text) else '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def _signal_s(workload: Workload, options: SlurmOptions) -> int:
    if options.signal is not None:
        found = _SIGNAL.fullmatch(options.signal)
        assert found is not None  # checked when the options were made
        return int(found[1])
    return math.ceil(workload.grace_s) + AFTER_GRACE_S if workload.grace_s else 0


def _check_time(workload: Workload, options: SlurmOptions) -> None:
    """Raise LaunchError if Slurm would send its signal before the first training step."""
    limit_s, lead_s = limit_seconds(options.time), _signal_s(workload, options)
    if limit_s is not None and lead_s and limit_s <= lead_s:
        raise LaunchError(
            f"time={options.time} is {limit_s} s and TERM comes {lead_s} s before its end, so before the first step: "
            f"give more than {math.ceil(lead_s / 60)} minutes, or a shorter signal=TERM@SECONDS (and trainer.grace_s)"
        )


def limit_seconds(time: Optional[str]) -> Optional[int]:
    """Return sbatch's time limit (m, m:ss, h:mm:ss, d-h[:mm[:ss]]) in seconds, or None if there is no limit."""
    if time is None or not time[0].isdigit():
        return None
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, [*parts, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def environment(workload: Workload, options: SlurmOptions) -> Iterator[str]:
    if options.env_file:
        file = shlex.quote(options.env_file)
        yield f'set -a\n. {file} || {{ echo "error: cannot read "{file} >&2; exit {USER_ERROR}; }}\nset +a'
    lines = ["export PYTHONUNBUFFERED=1"]
    if workload.is_distributed:
        if workload.cpu:
            lines.append(f"export OMP_NUM_THREADS={workload.threads(workload.cpu)}")
        else:
            cores = f"${{SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}} / {workload.ranks_per_node}"
            lines.append(f"threads=$(( {cores} ))\nexport OMP_NUM_THREADS=$(( threads > 0 ? threads : 1 ))")
    env = {**options.network_env, **workload.env}
    lines += [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
    # the submitting user's limit also holds in the job, unless slurm.conf sets another
    if options.locks_memory:
        warning = "warning: ulimit -l is $(ulimit -l) KiB, but the network needs locked memory: see docs/do/cluster.md"
        lines.append(f'ulimit -l "$(ulimit -H -l)"; [ "$(ulimit -l)" = unlimited ] || echo "{warning}" >&2')
    yield "\n".join(lines)


def _of_task(words: list[str]) -> list[str]:
    """Return the words, changed so that each task of an array has a separate folder for its ranks' output."""
    after = [False, *(word == "--log-dir" for word in words)]
    return [
        f'{word}"/task_$SLURM_ARRAY_TASK_ID"' if is_dir else word for word, is_dir in zip(words, after, strict=False)
    ]


def _start(workload: Workload, options: SlurmOptions) -> Iterator[str]:
    yield from meeting_lines(workload)
    if workload.steps and workload.is_resumable:
        newest = f"find {shlex.quote(workload.steps)} -maxdepth 1 -name 'step_*' 2> /dev/null | sort | tail -n 1"
        yield f"newest_step() {{ {newest}; }}"
        yield "before=$(newest_step)"
    if workload.image:
        yield HAS_CONTAINERS
    yield "code=0"
    words = srun_words(workload)
    yield _folded(_of_task(words) if options.array and not workload.is_elastic else words) + " || code=$?"


def meeting_lines(workload: Workload) -> list[str]:
    """Return shell lines that define variables for srun's command: the first node, and a port on it."""
    if not workload.is_distributed or workload.is_elastic:
        return []
    return [
        'head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "port=$(( 20000 + SLURM_JOB_ID % 10000 ))  # jobs that share a node must not share it",
    ]


def srun_words(workload: Workload) -> list[str]:
    flags = ["--export=ALL", '${SLURM_CPUS_PER_TASK:+"--cpus-per-task=$SLURM_CPUS_PER_TASK"}']
    if workload.is_distributed:
        # The last node may still be saving when the first node has ended.
        flags += ["--kill-on-bad-exit=0", f"--wait={math.ceil(workload.grace_s) + AFTER_GRACE_S}"]
    if workload.image:
        mounts = ",".join(f"{m.source}:{m.target}{':ro' if m.read_only else ''}" for m in workload.mounts)
        flags += [f"--container-image={shlex.quote(workload.image)}"]  # of the pyxis plugin
        flags += [f"--container-mounts={shlex.quote(mounts)}"] if mounts else []
    job_id = "$SLURM_ARRAY_JOB_ID" if workload.is_elastic else "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"
    return ["srun", *flags, *workload.shell_words("$head_node", job_id, "$port")]


def _folded(words: list[str]) -> str:
    """Write one command over several lines. A flag stays with its value."""
    phrases = words[:1]
    for word in words[1:]:
        is_value = phrases[-1].startswith("-") and not set(" =") & set(phrases[-1]) and not word.startswith("-")
        phrases[-1:] = [f"{phrases[-1]} {word}"] if is_value else [phrases[-1], word]
    lines = phrases[:1]
    for phrase in phrases[1:]:
        if len(lines[-1]) + 1 + len(phrase) > LINE_WIDTH:
            lines.append("   ")
        lines[-1] += f" {phrase}"
    return " \\\n".join(lines)


def _ending(workload: Workload, options: SlurmOptions) -> str:
    """Return lines that requeue the job if a restart helps, and it is not being cancelled or preempted."""
    if not options.requeue:
        return 'echo "the ranks ended with code $code"\nexit $code'
    cases = [f"        {' | '.join(map(str, sorted({DONE, *FINAL} - {REQUEUE})))}) ;;"]
    if workload.is_resumable:
        cases.append(_after_sigterm(workload))
    if workload.max_retries:
        cases.append(f'        *) failed "code $code" {workload.max_retries} ;;')
    return f"""\
echo "the ranks ended with code $code"
# {REQUEUE}: stopped in time and saved. A restart does not help after some codes; all other codes are failures.
again=no
failures="$SLURM_JOB_NAME-$SLURM_JOB_ID.failures"
failed() {{  # arguments: what happened, how often to retry it
    echo "$1" >> "$failures"
    if [ "$(wc -l < "$failures")" -le "$2" ]; then again=yes; else echo "not retried: $1"; fi
}}
if [ "$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)" = RUNNING ]; then
    case $code in
{chr(10).join(cases)}
    esac
fi
[ $again = yes ] && scontrol requeue "$SLURM_JOB_ID"
[ "$code" -eq {DONE} ] && rm -f -- "$failures"
exit $code"""


def _after_sigterm(workload: Workload) -> str:
    """Return lines that count a start as failed if SIGTERM stopped it before it saved a checkpoint."""
    again = f'[ "${{SLURM_RESTART_COUNT:-0}}" -lt {MAX_REQUEUES} ]'
    if not workload.steps:
        return f"        {REQUEUE}) {again} && again=yes ;;"
    return f"""\
        {REQUEUE})
            if [ "$(newest_step)" = "$before" ]; then
                failed "nothing was saved before SIGTERM came" {max(workload.max_retries, EMPTY_STARTS)}
            elif {again}; then
                again=yes
            fi ;;"""
