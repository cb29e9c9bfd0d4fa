"""Erase a value and prove it:  python -m pipeline erase feature=user_id value=u123 registry=registry/shop
folders=[runs,datasets,logs]

The row of the value and its optimizer state are reset in every step, artifact and delta, vocabularies and prepared rows
forget it, and raw rows with it are removed. Then every file is searched for the value and its rows. The exit code is 1
if a file still contains the value or a row.
"""

from __future__ import annotations

import sys

from pipeline.cli.verb import verb
from pipeline.extras.erase.config import EraseJob
from pipeline.runtime.process.stdout import write_out


def run(job: EraseJob) -> str:
    from pipeline.extras.erase.run import describe, erase

    result = erase(job)
    lines = "\n".join(describe(job, result))
    if result.left:
        write_out(lines)
        sys.exit(1)
    return lines


main = verb("erase", EraseJob, describe=str)(run)
