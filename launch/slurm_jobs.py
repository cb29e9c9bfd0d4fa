"""Submit, query, cancel and list jobs by Slurm's own commands.

slurmctld is asked first, so no accounting is needed; where there is some, sacct knows jobs that slurmctld has forgotten
(after MinJobAge, five minutes by default). What Slurm refuses is a LaunchError with Slurm's own words.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Optional

from pipeline.runtime.errors import LaunchError

FIELDS = "%i|%T|%j|%N|%R"  # job id, state, name, nodes, why it waits
# The state of an array: it runs while one of its tasks runs, and has failed if one of them has failed.
UNFINISHED = ("RUNNING", "COMPLETING", "PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED")


@dataclass(frozen=True)
class SlurmJob:
    job_id: str
    state: str  # in Slurm's words, RUNNING for instance
    name: str
    nodes: list[str]
    reason: str = ""
    restarts: int = 0
    exit_code: int = 0  # of the script; 0 too where Slurm does not say


def submit(script: str, flags: Sequence[str] = ()) -> str:
    """The id of the job that sbatch makes of the script."""
    return _ask(["sbatch", "--parsable", *flags], script).strip().partition(";")[0]


def find_job(job_id: str) -> Optional[SlurmJob]:
    """None where neither slurmctld nor accounting knows it."""
    if not re.fullmatch(r"\d+(_\d+)?", job_id):  # 14_3: task 3 of an array
        raise LaunchError(f"{job_id} is no number of a Slurm job, or of an array's task; `squeue --me` lists yours")
    tasks = {task.job_id: task for task in _in_queue(job_id)}
    if not tasks or (any("_" in task for task in tasks) and "_" not in job_id):  # slurmctld forgets tasks one by one
        ended = (task for task in _accounted(["--jobs", job_id]) if not tasks or "[" not in task.job_id)
        tasks = {task.job_id: task for task in ended} | tasks
    return _whole(job_id, list(tasks.values()))


def _whole(job_id: str, tasks: list[SlurmJob]) -> Optional[SlurmJob]:
    """The job of these tasks, of an array or the only one; None of none."""
    order = [*UNFINISHED, "", "CANCELLED", "COMPLETED"]
    first = min(tasks, key=lambda task: order.index(task.state if task.state in order else ""), default=None)
    if first is None or len(tasks) == 1:
        return first and replace(first, job_id=job_id)
    alike = [task.job_id for task in tasks if task.state == first.state]
    nodes = sorted({node for task in tasks for node in task.nodes})
    reason = f"{len(alike)} of {len(tasks)} tasks, {', '.join(alike[:5])}{', ...' if alike[5:] else ''}"
    return replace(first, job_id=job_id, nodes=nodes, reason=reason, exit_code=max(task.exit_code for task in tasks))


def list_jobs() -> list[SlurmJob]:
    """This user's jobs, the newest first."""
    queued = _ask(["squeue", "--me", "--noheader", "--states=all", f"--format={FIELDS}"])
    jobs = {job.job_id: job for job in _parsed(queued)}
    jobs = {job.job_id: job for job in _accounted([])} | jobs
    return sorted(jobs.values(), key=lambda job: int(re.match(r"\d*", job.job_id)[0] or 0), reverse=True)  # type: ignore[index]


def cancel(job_id: str) -> None:
    _ask(["scancel", job_id])


def output_paths(job_id: str) -> list[str]:
    """The files that the job's tasks write to, as long as slurmctld remembers them."""
    return [shown["StdOut"] for shown in _shown(job_id) if "StdOut" in shown]


def gives_cores_by_gpu(partition: Optional[str]) -> bool:
    """Whether a job in the partition (None: the default one) gets cores by its GPUs; False where there is no Slurm."""
    if shutil.which("scontrol") is None:
        return False
    config, partitions = (_run(["scontrol", "show", what, "--oneliner"]).stdout for what in ("config", "partition"))
    named = partition.split(",") if partition else []
    lines = [
        line
        for line in partitions.splitlines()
        if (line.partition(" ")[0].partition("=")[2] in named if named else " Default=YES" in line)
    ]
    return any("DefCpuPerGPU=" in line for line in [config, *lines])


def _in_queue(job_id: str) -> list[SlurmJob]:
    """The job, or each task of an array; nothing if slurmctld does not know it."""
    return [_queued(job_id, shown) for shown in _shown(job_id) if "JobState" in shown]


def _queued(job_id: str, shown: dict[str, str]) -> SlurmJob:
    task = f"{shown['ArrayJobId']}_{shown['ArrayTaskId']}" if "ArrayTaskId" in shown else job_id
    reason = shown.get("Reason", "").replace("None", "")
    nodes = _expanded(shown.get("NodeList", ""))
    restarts, code = int(shown.get("Restarts", 0)), int(shown.get("ExitCode", "0:0").partition(":")[0])
    return SlurmJob(task, shown["JobState"], shown.get("JobName", ""), nodes, reason, restarts, code)


def _shown(job_id: str) -> list[dict[str, str]]:
    """What slurmctld says of a job, or of each task of an array, by key; empty if it does not know the job."""
    words = ["scontrol", "show", "job", "--oneliner", job_id]
    done = _run(words)
    if done.returncode and "Invalid job id" not in done.stderr:
        raise LaunchError(_refusal(words, done.stderr))
    keys = "JobState|JobName|NodeList|Reason|Restarts|StdOut|ExitCode|ArrayJobId|ArrayTaskId"
    found = (re.findall(rf"(?:^| )({keys})=(\S*)", line) for line in done.stdout.splitlines())
    return [dict(reversed(pairs)) for pairs in found if pairs]  # the first of each: a comment may hold anything


def _accounted(flags: list[str]) -> list[SlurmJob]:
    """Nothing where the cluster keeps no accounts: sacct fails there, or prints a line that says so."""
    done = _run(
        ["sacct", "--allocations", "--noheader", "--parsable2", "--starttime=now-30days", "--format=JobID,State,JobName,NodeList", *flags]
    )  # fmt: skip
    return list(_parsed(done.stdout)) if done.returncode == 0 else []


def _parsed(text: str) -> list[SlurmJob]:
    jobs = []
    for line in text.splitlines():
        job_id, state, name, nodes, *reason = [*line.split("|"), "", "", ""][:5]
        if re.fullmatch(r"\d+.*", job_id) and state:
            # sacct says `CANCELLED by 1000`.
            jobs.append(SlurmJob(job_id, state.split()[0].rstrip("+"), name, _expanded(nodes), "".join(reason)))
    return jobs


def _expanded(nodes: str) -> list[str]:
    """'gpu[1-2]' -> gpu1, gpu2."""
    if nodes in ("", "None assigned", "(null)"):
        return []
    if "[" not in nodes and "," not in nodes:
        return [nodes]
    return _ask(["scontrol", "show", "hostnames", nodes]).split()


def _ask(words: Sequence[str], stdin: str = "") -> str:
    done = _run(words, stdin)
    if done.returncode:
        raise LaunchError(_refusal(words, done.stderr))
    return done.stdout


def _run(words: Sequence[str], stdin: str = "") -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(words, input=stdin, capture_output=True, text=True)
    except FileNotFoundError:
        raise LaunchError(
            f"there is no {words[0]} on this machine: run this where the cluster's jobs are submitted, "
            "or print the script with `python -m launch.render slurm`"
        ) from None


def _refusal(words: Sequence[str], stderr: str) -> str:
    text = " ".join(stderr.split()) or "it printed nothing"
    return f"Slurm refused: {text}" if words[0] in text else f"Slurm refused: {words[0]}: {text}"
