"""Render a run as one HTML page:  python -m pipeline report run=runs/quickstart

The page opens from disk, prints, and loads nothing: curves, calibration, features, worst slices, plan, data set, config.
Training writes it at the end of each run (logger.report). Several runs: python -m pipeline runs compare RUN RUN html=PAGE
"""

from __future__ import annotations

from pipeline.cli.verb import verb
from pipeline.extras.runs.config import ReportJob


def report(job: ReportJob) -> str:
    """Write the page and return its path. Raises ConfigError if there is no run."""
    from pipeline.extras.runs.folder import open_run
    from pipeline.extras.runs.report import write_report

    return write_report(open_run(job.run), job.output)


main = verb("report", ReportJob, describe=str)(report)
