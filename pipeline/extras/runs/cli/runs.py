"""List, compare, show, tag, clean and remove runs:  python -m pipeline runs list

    python -m pipeline runs list [ROOT] [sort=ne] [output=runs.parquet]
    python -m pipeline runs compare RUN RUN... [html=page.html]      is one better, and how sure is that?
    python -m pipeline runs show RUN                                 its settings and all measurements
    python -m pipeline runs tag RUN TAG... [note='...']              a leading - removes a tag: 'tags=[-old]'
    python -m pipeline runs clean RUN [keep_days=30]                 removes old rank logs and damaged checkpoints
    python -m pipeline runs remove RUN [force=true]                  removes the folder with its checkpoints

Everything is read from the run folders. Runs that differ only in trainer.seed are compared as one
variant.
"""

from __future__ import annotations

from collections.abc import Callable

from pipeline.cli.command_line import Command
from pipeline.cli.verb import verb
from pipeline.extras.runs.config import RunsJob
from pipeline.runtime.storage import storage


def list_runs(job: RunsJob) -> str:
    """Return one line for each run."""
    from pipeline.extras.runs.folder import find_runs
    from pipeline.extras.runs.listing import as_rows, as_text, sorted_runs, write_parquet

    found = find_runs(job.root)
    if not found:
        return f"no run in {job.root}"
    runs = sorted_runs(found, job.sort)
    if job.output:
        write_parquet(job.output, as_rows(runs))
    return as_text(runs)


def compare_runs(job: RunsJob) -> str:
    from pipeline.extras.runs.compare import compare
    from pipeline.extras.runs.folder import open_run
    from pipeline.extras.runs.listing import write_parquet
    from pipeline.extras.runs.report_comparison import render_comparison

    comparison = compare([open_run(path) for path in job.runs], job.split, job.confidence)
    if job.output:
        write_parquet(job.output, comparison.as_rows())
    if job.html:
        storage.publish_text(job.html, render_comparison(comparison))
    return comparison.as_text()


def show_run(job: RunsJob) -> str:
    from pipeline.extras.runs.folder import open_run
    from pipeline.extras.runs.listing import describe_run

    return "\n".join(describe_run(open_run(job.run)))


def tag_run(job: RunsJob) -> str:
    from pipeline.extras.runs.folder import open_run
    from pipeline.extras.runs.listing import tag

    return f"{job.run}  tags: {', '.join(tag(open_run(job.run), job.tags, job.note)) or 'none'}"


def clean_run(job: RunsJob) -> str:
    from pipeline.extras.runs.folder import open_run
    from pipeline.extras.runs.listing import clean

    removed = clean(open_run(job.run), job.keep_days)
    return "\n".join([*(f"removed {path}" for path in removed), f"{len(removed)} removed from {job.run}"])


def remove_run(job: RunsJob) -> str:
    from pipeline.extras.runs.folder import open_run
    from pipeline.extras.runs.listing import remove

    remove(open_run(job.run), job.force)
    return f"removed {job.run}"


RUN: dict[str, Callable[[RunsJob], str]] = {
    "list": list_runs, "compare": compare_runs, "show": show_run, "tag": tag_run, "clean": clean_run, "remove": remove_run,
}  # fmt: skip


def run(job: RunsJob) -> str:
    """Return the text that the command prints."""
    return RUN[job.command](job)


COMMANDS = (
    Command("list", ("root",)),
    Command("compare", many="runs"),
    Command("show", ("run",)),
    Command("tag", ("run",), many="tags"),
    Command("clean", ("run",)),
    Command("remove", ("run",)),
)
main = verb("runs", RunsJob, describe=str, commands=COMMANDS, default="list")(run)
