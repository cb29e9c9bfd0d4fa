"""Submit, query, cancel and list jobs by Slurm's commands.

slurmctld is queried first, so accounting is optional. sacct knows jobs that slurmctld has
forgotten (after MinJobAge, five minutes by default). LaunchError quotes Slurm's refusal.
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
# The state of an array: running if one of its tasks runs, failed if one of them has failed.
UNFINISHED = ("RUNNING", "COMPLETING", "PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED")


@dataclass(frozen=True)
class SlurmJob:
    job_id: str
    state: str  # Slurm's word, such as RUNNING
    name: str
    nodes: list[str]
    reason: str = ""
    restarts: int = 0
    exit_code: int = 0  # of the script; also 0 if Slurm does not report it


def submit(script: str, flags: Sequence[str] = ()) -> str:
    """Submit the script with sbatch and return the job id."""
    return _ask(["sbatch", "--parsable", *flags], script).strip().partition(";")[0]


def find_job(job_id: str) -> Optional[SlurmJob]:
    """Return the job, or None if neither slurmctld nor accounting knows it."""
    if not re.fullmatch(r"\d+(_\d+)?", job_id):  # 14_3: task 3 of an array
        raise LaunchError(f"{job_id} is not the number of a Slurm job or of an array's task; `squeue --me` lists yours")
    tasks = {task.job_id: task for task in (_queued(job_id, shown) for shown in _shown(job_id) if "JobState" in shown)}
    # slurmctld forgets tasks one by one
    if not tasks or (any("_" in task for task in tasks) and "_" not in job_id):
        ended = (task for task in _accounted(["--jobs", job_id]) if not tasks or "[" not in task.job_id)
        tasks = {task.job_id: task for task in ended} | tasks
    return _whole(job_id, list(tasks.values()))


def _whole(job_id: str, tasks: list[SlurmJob]) -> Optional[SlurmJob]:
    """Return the array or single job that these tasks belong to, or None if there are no tasks."""
    order = [*UNFINISHED, "", "CANCELLED", "COMPLETED"]
    first = min(tasks, key=lambda task: order.index(task.state if task.state in order else ""), default=None)
    if first is None or len(tasks) == 1:
        return first and replace(first, job_id=job_id)
    alike = [task.job_id for task in tasks if task.state == first.state]
    nodes = sorted({node for task in tasks for node in task.nodes})
    reason = f"{len(alike)} of {len(tasks)} tasks, {', '.join(alike[:5])}{', ...' if alike[5:] else ''}"
    return replace(first, job_id=job_id, nodes=nodes, reason=reason, exit_code=max(task.exit_code for task in tasks))


def list_jobs() -> list[SlurmJob]:
    """Return this user's jobs, the newest first."""
    queued = _parsed(_ask(["squeue", "--me", "--noheader", "--states=all", f"--format={FIELDS}"]))
    jobs = {job.job_id: job for job in [*_accounted([]), *queued]}
    return sorted(jobs.values(), key=lambda job: int(re.match(r"\d*", job.job_id)[0] or 0), reverse=True)  # type: ignore[index]


def cancel(job_id: str) -> None:
    _ask(["scancel", job_id])


def output_paths(job_id: str) -> list[str]:
    """Return the files that the job's tasks write to. Empty if slurmctld has forgotten the job."""
    return [shown["StdOut"] for shown in _shown(job_id) if "StdOut" in shown]


def gives_cores_by_gpu(partition: Optional[str]) -> bool:
    """Return True if a job in the partition (None: the default partition) gets cores in proportion to its GPUs."""
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


def _queued(job_id: str, shown: dict[str, str]) -> SlurmJob:
    task = f"{shown['ArrayJobId']}_{shown['ArrayTaskId']}" if "ArrayTaskId" in shown else job_id
    reason = shown.get("Reason", "").replace("None", "")
    nodes = _expanded(shown.get("NodeList", ""))
    restarts, code = int(shown.get("Restarts", 0)), int(shown.get("ExitCode", "0:0").partition(":")[0])
    return SlurmJob(task, shown["JobState"], shown.get("JobName", ""), nodes, reason, restarts, code)


def _shown(job_id: str) -> list[dict[str, str]]:
    """Return slurmctld's fields of a job, or of each task of an array. Empty if slurmctld does not know the job."""
    words = ["scontrol", "show", "job", "--oneliner", job_id]
    done = _run(words)
    if done.returncode and "Invalid job id" not in done.stderr:
        raise LaunchError(_refusal(words, done.stderr))
    keys = "JobState|JobName|NodeList|Reason|Restarts|StdOut|ExitCode|ArrayJobId|ArrayTaskId"
    found = (re.findall(rf"(?:^| )({keys})=(\S*)", line) for line in done.stdout.splitlines())
    # the first of each key, because a comment may contain anything
    return [dict(reversed(pairs)) for pairs in found if pairs]


def _accounted(flags: list[str]) -> list[SlurmJob]:
    """Return the jobs that accounting lists. Empty if the cluster has no accounting."""
    done = _run(
        ["sacct", "--allocations", "--noheader", "--parsable2", "--starttime=now-30days", "--format=JobID,State,JobName,NodeList", *flags]
    )  # fmt: skip
    return _parsed(done.stdout) if done.returncode == 0 else []


def _parsed(text: str) -> list[SlurmJob]:
    jobs = []
    for line in text.splitlines():
        job_id, state, name, nodes, *reason = [*line.split("|"), "", "", ""][:5]
        if re.fullmatch(r"\d+.*", job_id) and state:
            # sacct prints `CANCELLED by 1000`.
            jobs.append(SlurmJob(job_id, state.split()[0].rstrip("+"), name, _expanded(nodes), "".join(reason)))
    return jobs


def _expanded(nodes: str) -> list[str]:
    """Expand 'gpu[1-2]' to gpu1, gpu2."""
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
            f"{words[0]} is not installed on this machine: run this on a machine that submits "
            "jobs to the cluster, or print the script with `python -m launch.render slurm`"
        ) from None


def _refusal(words: Sequence[str], stderr: str) -> str:
    text = " ".join(stderr.split()) or "it printed nothing"
    return f"Slurm refused: {text}" if words[0] in text else f"Slurm refused: {words[0]}: {text}"
