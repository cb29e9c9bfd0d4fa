"""Search values of a training:  python -m pipeline sweep experiment=quickstart sweep=lr

    python -m pipeline sweep experiment=quickstart sweep=lr sweep.prune=asha trainer.evaluate_max_batches=20
    python -m pipeline sweep experiment=quickstart sweep=lr sweep.sampler=random sweep.trials=40 sweep.parallel=2

Every trial is an ordinary run in <run_dir>/trials. Run the same command again to resume a killed
sweep. Needs the package extra `sweep` (Optuna).
"""

from __future__ import annotations

import sys

from pipeline.cli.command_line import load_config, split_flags, validate_train
from pipeline.cli.verb import resume_hint, verb
from pipeline.config.jobs.train import TrainJob
from pipeline.extras.sweep.config import SweepJob
from pipeline.runtime.storage import storage

OWN = ("sweep", "run_dir")  # words for the sweep, not for trainings, next to sweep.* and budget.*


def training_words(words: list[str]) -> list[str]:
    """Return the overrides and flags of every training of the sweep."""
    overrides, flags = split_flags(words)
    kept = [
        word for word in overrides if not word.startswith(("sweep.", "budget.")) and word.partition("=")[0] not in OWN
    ]
    return [*kept, *(f"{name}={value}" for name, value in flags.items() if name == "--config-dir")]


def compose(words: list[str]) -> TrainJob:
    """Return the job of a trial after it was checked against its data set. Raises UserError."""
    job = load_config(TrainJob, words)
    validate_train(job)
    return job


def run(job: SweepJob) -> str:
    from pipeline.extras.sweep.outcome import describe, render_page
    from pipeline.extras.sweep.run import sweep

    result = sweep(job, training_words(sys.argv[1:]), compose)
    storage.publish_text(f"{result.run_dir}/sweep.html", render_page(result, job.name))
    return describe(result)


main = verb("sweep", SweepJob, describe=str, validate=validate_train, when_interrupted=resume_hint)(run)
