"""Evaluate a trained model:  python -m pipeline evaluate run=runs/quickstart split=test

Any step of the run (step=300), any split, on any number of ranks:
torchx run -s local_cwd pipeline.evaluate -j 1x2 -- run=runs/quickstart split=validation
"""

from __future__ import annotations

from pipeline.cli.verb import verb
from pipeline.config.jobs.evaluate import EvaluateJob
from pipeline.runtime.process.processes import none_while_importing
from pipeline.training.run_state import load_trained_job
from pipeline.training.summary import EvaluateSummary, describe_evaluation


def run(job: EvaluateJob) -> EvaluateSummary:
    with none_while_importing():  # here, because a typo in the command line must fail before torch is loaded
        from pipeline.training.evaluate import evaluate
    return evaluate(job)


main = verb(
    "evaluate",
    EvaluateJob,
    describe=describe_evaluation,
    validate=load_trained_job,
    runs_on_ranks=True,
    handles_sigterm=True,
    runs_kernels=True,
)(run)
