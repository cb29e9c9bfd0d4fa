"""Say why two versions score differently:  python -m pipeline explain old=runs/monday new=runs/tuesday source=clicks.csv

    python -m pipeline registry explain registry/shop v12 v13 source=clicks.csv label=click html=why.html

Both versions score the same raw rows. Then one part at a time is swapped between them: the rows, vocabulary and
quantizer of each feature's table, each group of layers, the calibration. The parts are ranked by how much scores move.
"""

from __future__ import annotations

from pipeline.cli.command_line import Arguments, parse_command_line
from pipeline.cli.verb import verb
from pipeline.extras.explain_versions.config import ExplainJob
from pipeline.runtime.process.stdout import write_out


def run(job: ExplainJob) -> str:
    from pipeline.extras.explain_versions.explain import describe, explain

    return describe(job, explain(job))


def explain_in_registry(words: Arguments) -> None:
    """Run `registry explain REGISTRY OLD NEW key=value...`."""
    given = [f"{key}={words.values[key]}" for key in ("registry", "old", "new")]
    write_out(run(parse_command_line(ExplainJob, __doc__, [*given, *words.remaining()])))


main = verb("explain", ExplainJob, describe=str)(run)
