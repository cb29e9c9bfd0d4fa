"""Turn a Workload into a batch script for Slurm: one agent a node, which starts the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from launch.options import option
from launch.workload import Workload


@dataclass(frozen=True)
class SlurmOptions:
    """What sbatch takes beside the shape of the job."""

    partition: Optional[str] = option(None, "partition to run in")


def render_sbatch(workload: Workload, options: SlurmOptions) -> str:
    raise ValueError("launch.render slurm is being built")
