"""Train one model:  python -m pipeline train experiment=quickstart

On several ranks:  torchx run -s local_cwd pipeline.train -j 1x2 -- experiment=quickstart
A run folder that holds a checkpoint is resumed; another run_dir starts a new run. from=RUN trains that run again.
SIGTERM, or Ctrl-C once, saves at the next training step and ends with exit code 75 or 130; the same command resumes.
"""

from __future__ import annotations

from pipeline.cli.command_line import validate_train
from pipeline.cli.verb import verb
from pipeline.config.jobs.train import TrainJob
from pipeline.runtime.process.processes import none_while_importing
from pipeline.training.run_state import describe_saved
from pipeline.training.summary import TrainSummary, describe


def run(job: TrainJob) -> TrainSummary:
    with none_while_importing():  # here, because a typo in the command line must fail before torch is loaded
        from pipeline.training.train import train
    return train(job)


main = verb(
    "train",
    TrainJob,
    describe=describe,
    validate=validate_train,
    when_interrupted=describe_saved,
    runs_on_ranks=True,
    handles_sigterm=True,
    runs_kernels=True,
)(run)
