"""Rehearse a GPU job before it queues:  python -m pipeline rehearse experiment=quickstart
hardware=h100_80gb world_size=16 ranks=[0,15]

It runs two steps, an evaluation and a save for each of these ranks, on simulated GPUs, in a
temporary folder. For each rank it prints whether the rank started, its memory by part, its
collectives, and its host syncs and copies per step. It takes the keys of train. It needs the GPU
packages but no GPU; the data set may be missing.
"""

from __future__ import annotations

from pipeline.cli.verb import verb
from pipeline.extras.shadow.rehearsal.rehearse import RehearseJob, check_job, describe, rehearse

main = verb("rehearse", RehearseJob, describe=describe, validate=check_job)(rehearse)
