"""Evaluate a trained model:  python -m pipeline evaluate run=runs/quickstart split=test

Any step of the run (step=300), any split, on any number of ranks:
torchx run -s local_cwd pipeline.evaluate -j 1x2 -- run=runs/quickstart split=validation
"""

from __future__ import annotations

from pipeline.cli.verb import verb
from pipeline.config.jobs.evaluate import EvaluateJob
from pipeline.training.evaluate_run import describe, evaluate

main = verb("evaluate", EvaluateJob, describe=describe, runs_on_ranks=True, handles_sigterm=True, runs_kernels=True)(
    evaluate
)
