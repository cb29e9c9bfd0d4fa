"""Check the nodes of a job before a long run: torchx run -s slurm pipeline.doctor -j 2x1 --gpu 8 --
folder=/shared/runs

The job's process group measures the links between all pairs of nodes, an all-to-all, and the
clocks. The command compares versions and GPUs of all nodes, and checks that `folder` is the same
file system on all nodes. One rank per node is enough. Each problem is printed with its fix. With a
problem the exit code is 2.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.cli.verb import verb
from pipeline.config.jobs.prepare import CheckNodesJob
from pipeline.devices.process_group import init_distributed
from pipeline.extras.nodes.check import Limits, NodesReport, check_nodes, describe
from pipeline.runtime.errors import LaunchError


def check(job: CheckNodesJob) -> NodesReport:
    """Check the nodes. If there is a problem, rank 0 prints the report, and all ranks raise LaunchError."""
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
