"""Inspect raw rows, and write a data config that reads them:  python -m pipeline inspect source=clicks.csv

For each column it prints its role, missing values, the number of values, and how well it alone predicts the label.
A column that predicts the label almost always is left out, because it may be known only afterwards. Check the
written file before you prepare.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cli.verb import verb
from pipeline.config.jobs.prepare import InspectJob
from pipeline.runtime.shell_words import word
from pipeline.runtime.storage import storage

if TYPE_CHECKING:
    from pipeline.data.inspect.profile import Profile
    from pipeline.data.inspect.propose import Proposal


@dataclass(frozen=True)
class Inspection:
    """The findings about a raw file. yaml: the data config that reads it. text: what the command
    prints. profile and proposal are None if a format recognized the file."""

    name: str
    profile: Profile | None
    proposal: Proposal | None
    yaml: str = field(repr=False)
    text: str = field(repr=False)

    def __str__(self) -> str:
        return self.text


def look(job: InspectJob) -> Inspection:
    """Inspect the file. Raises DataError if no config can be made from it."""
    from pipeline.data.inspect.profile import profile
    from pipeline.data.inspect.propose import as_text, as_yaml, propose, propose_format

    name = job.data_name or re.sub(r"\W+", "_", Path(job.source).name.partition(".")[0]).strip("_").lower()
    if job.label is None and (known := propose_format(job.source, name)):
        return Inspection(name, None, None, *known)
    found = profile(job.source, job.label, job.max_rows, job.label_values, job.label_threshold)
    proposal = propose(found, name)
    return Inspection(name, found, proposal, as_yaml(proposal, found), as_text(proposal, found))


def inspect(job: InspectJob) -> str:
    """Describe the findings and write the config. Raises as look does."""
    found = look(job)
    path = job.output or f"{found.name}.yaml"
    storage.publish_text(path, found.yaml)
    return f"{found}\nwritten to  {path}\nnext        python -m pipeline init my_project {word('data', path)} {word('source', job.source)}"


main = verb("inspect", InspectJob, describe=str)(inspect)
