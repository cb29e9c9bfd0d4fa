"""Export a checkpoint as an artifact that scores raw rows:  python -m pipeline export run=runs/quickstart precision=int8

Tables in fp32, fp16, int8, int4 or int2, one by one too (tables.cat_3=fp16), or precision=auto for the smallest mix within
ne_budget; rows left out by pruning.kind=untrained or frequency; layers in fp32, bf16 or int8 (dense=bf16), and compiled
ahead of time (compiled=true). What it costs in quality is measured and stands in the artifact; past parity.max_ne_increase
and the like nothing is written. A two-tower becomes a user's program, an item's program, and its items' vectors with an index
(retrieval.index=auto).
"""

from __future__ import annotations

from pipeline.cli.verb import verb
from pipeline.config.jobs.evaluate import ExportJob
from pipeline.serving.artifact.export_run import describe, export

main = verb("export", ExportJob, describe=describe, handles_sigterm=True, runs_kernels=True)(export)
