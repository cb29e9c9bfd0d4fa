"""Export a checkpoint as an artifact that scores raw rows:  python -m pipeline export run=runs/quickstart precision=int8

Tables are stored in fp32, fp16, int8, int4 or int2, also one by one (tables.cat_3=fp16); precision=auto finds the
smallest mix within ne_budget. pruning.kind=untrained or frequency leaves rows out. Layers are stored in fp32, bf16 or
int8 (dense=bf16), and compiled ahead of time with compiled=true. The loss of quality is measured and stored in the
artifact; if it exceeds parity.max_ne_increase or another limit, nothing is written. A two-tower model becomes a user's
program, an item's program, and its items' vectors with an index (retrieval.index=auto).
"""

from __future__ import annotations

from pipeline.cli.verb import verb
from pipeline.config.jobs.evaluate import ExportJob
from pipeline.serving.artifact.export import describe, export

main = verb("export", ExportJob, describe=describe, handles_sigterm=True, runs_kernels=True)(export)
