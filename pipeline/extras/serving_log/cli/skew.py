"""Prove that training prepares and scores served rows as the server did:  python -m pipeline skew artifact=A log=logs/serving

It prepares the logged rows again, scores them with the artifact and delta of each row, and compares
bits. rows=training.parquet compares the log with the training rows of the same requests, and names
each column that differs. Exit code 4: there is more skew than the limits allow.

    python -m pipeline skew artifact=A reference=reference.json    measure the training split for observers.drift
"""

from __future__ import annotations

import sys

from pipeline.cli.verb import verb
from pipeline.extras.serving_log.job import SkewJob
from pipeline.runtime.process.stdout import write_out

SKEWED = 4  # the exit code


def run(job: SkewJob) -> None:
    from pipeline.extras.serving_log.skew import describe, skew, write_reference

    if job.log is None:
        write_out(write_reference(job))
        return
    certificate = skew(job)
    write_out(describe(certificate))
    if not certificate["passed"]:
        sys.exit(SKEWED)


main = verb("skew", SkewJob)(run)
