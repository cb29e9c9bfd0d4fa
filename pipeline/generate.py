"""Draw a source with a planted teacher, in Criteo's format:  python -m pipeline.generate data=quickstart"""

from __future__ import annotations

import time
from dataclasses import dataclass

from pipeline.config import run_verb
from pipeline.jobs import GenerateJob


@dataclass(frozen=True)
class GenerateSummary:
    output: str
    num_rows: int
    seconds: float
    next_command: str


def generate(job: GenerateJob) -> GenerateSummary:
    """Equal settings give equal bytes, whatever the number of threads."""
    # Here, so that a typo in the command fails before numpy and pyarrow are imported.
    from pipeline.data.synthetic import write_source

    assert job.data.synthetic is not None
    started = time.monotonic()
    write_source(job.data.synthetic, job.output, job.threads)
    next_command = f"python -m pipeline.prepare data={job.data.name} source={job.output}"
    return GenerateSummary(job.output, job.data.synthetic.num_rows, time.monotonic() - started, next_command)


def describe(summary: GenerateSummary) -> str:
    return (
        f"wrote {summary.num_rows:,} rows to {summary.output} in {summary.seconds:.1f} s, "
        f"their true probabilities beside it\nnext: {summary.next_command}"
    )


if __name__ == "__main__":
    run_verb(GenerateJob, generate, __doc__, describe)
