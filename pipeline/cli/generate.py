"""Generate raw rows whose best possible AUC is known, in Criteo's format or with named columns:  python -m pipeline generate data=quickstart"""

from __future__ import annotations

import time
from dataclasses import dataclass

from pipeline.cli.verb import verb
from pipeline.config.jobs.prepare import GenerateJob
from pipeline.runtime.shell_words import command, word


@dataclass(frozen=True)
class GenerateSummary:
    output: str
    num_rows: int
    seconds: float
    next_command: str


def generate(job: GenerateJob) -> GenerateSummary:
    """Generate raw rows. Equal settings give equal bytes for any number of threads."""
    # Here, so that a typo in the command fails before numpy and pyarrow are imported.
    from pipeline.data.generate import synthetic

    started = time.monotonic()
    if job.data.generator:
        config = job.data.read_generator()
        num_rows = config.num_rows
        config.write_source(job.output, job.threads)
    else:
        assert job.data.synthetic is not None
        num_rows = job.data.synthetic.num_rows
        names = job.data.columns if job.data.format == "tsv" else None
        synthetic.write_source(job.data.synthetic, job.output, job.threads, names)
    next_command = f"{command('prepare')} data={job.data.name} {word('source', job.output)}"
    return GenerateSummary(job.output, num_rows, time.monotonic() - started, next_command)


def describe(summary: GenerateSummary) -> str:
    return (
        f"wrote {summary.num_rows:,} rows to {summary.output} in {summary.seconds:.1f} s, "
        f"and their true probabilities next to the file\nnext: {summary.next_command}"
    )


main = verb("generate", GenerateJob, describe=describe)(generate)
