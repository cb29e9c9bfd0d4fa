"""Check the nodes of a job before a long run:  torchx run -s slurm pipeline.doctor -j 2x1 --gpu 8 -- folder=/shared/runs

Measured by the job's own process group: the links between each two nodes, an all-to-all, the clocks, versions and GPUs of all
nodes, and whether `folder` is one file system on all of them that renames and creates as checkpoints need it. One rank a node
is enough. What would break or slow down a run is listed with what to do, and the exit code is then 2.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.cli.verb import verb
from pipeline.config.jobs.machine import CheckNodesJob
from pipeline.devices.process_group import init_distributed
from pipeline.extras.nodes.check import Limits, NodesReport, check_nodes, describe
from pipeline.runtime.errors import LaunchError


def check(job: CheckNodesJob) -> NodesReport:
    """Raises LaunchError on all ranks where a check has failed, once rank 0 has printed the report."""
    context = init_distributed(job.backend, job.timeout_s)
    report = check_nodes(context, job.folder, job.megabytes, Limits(job.min_gb_per_s or 0.0, job.max_clock_skew_s))
    if context.is_main and job.output:
        Path(job.output).parent.mkdir(parents=True, exist_ok=True)
        Path(job.output).write_text(report.to_json())
    if report.problems:
        if context.is_main:
            print(describe(report), flush=True)
        raise LaunchError(
            f"{len(report.problems)} problem(s) of these nodes, listed above; the first: {report.problems[0]}"
        )
    return report


main = verb("check_nodes", CheckNodesJob, describe=describe, runs_on_ranks=True)(check)
