"""Say what is wrong with a trained model:  python -m pipeline diagnose run=runs/quickstart

It reads the run folder and up to 100,000 rows of each split. Each finding has its numbers, its
diagnosis, and a command to run next. `evaluate importance_rows=20000` adds what only the model shows.
"""

from __future__ import annotations

from pipeline.cli.verb import verb
from pipeline.extras.diagnose.config import DiagnoseJob


def diagnose(job: DiagnoseJob) -> str:
    """Return a line per finding. Raises ConfigError if there is no run."""
    from pipeline.extras.diagnose.rules import RULES, find_problems
    from pipeline.extras.runs.folder import open_run

    found = find_problems(open_run(job.run))
    return "\n".join(each.text for each in found) or f"nothing found by {len(RULES)} checks of {job.run}"


main = verb("diagnose", DiagnoseJob, describe=str)(diagnose)
