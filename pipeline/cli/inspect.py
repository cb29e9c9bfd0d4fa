"""Inspect raw rows, and write a data config that reads them:  python -m pipeline inspect source=clicks.csv

For each column it prints its role, missing values, the number of values, and how well it alone predicts the label.
A column that predicts the label almost always is left out, because it may be known only afterwards. Check the
written file before you prepare.
"""

from __future__ import annotations

import re
from pathlib import Path

from pipeline.cli.verb import verb
from pipeline.config.jobs.prepare import InspectJob
from pipeline.runtime.shell_words import word
from pipeline.runtime.storage import storage


def inspect(job: InspectJob) -> str:
    """Describe the findings and write the config. Raises DataError if no config can be made from
    the file."""
    from pipeline.data.inspect.profile import profile
    from pipeline.data.inspect.propose import as_text, as_yaml, propose

    name = job.data_name or re.sub(r"\W+", "_", Path(job.source).name.partition(".")[0]).strip("_").lower()
    found = profile(job.source, job.label, job.max_rows, job.label_values, job.label_threshold)
    proposal = propose(found, name)
    path = job.output or f"{name}.yaml"
    storage.publish_text(path, as_yaml(proposal, found))
    return f"{as_text(proposal, found)}\nwritten to  {path}\nnext        python -m pipeline init my_project {word('data', path)} {word('source', job.source)}"


main = verb("inspect", InspectJob, describe=str)(inspect)
