"""Start the ranks of a job as the launcher does, and return the record of rank 0.

This process starts an agent in a session of its own, so that Ctrl-C reaches the ranks once:

    python -m pipeline.cli.api.ranks agent --nproc-per-node 2 -m pipeline.cli.api.ranks REQUEST

REQUEST is a file with the verb and its job. The folder of the request has what the ranks report: the
record or the error, and the progress of rank 0.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from pipeline.cli.verb import Verb
from pipeline.cli.verbs import find_verb
from pipeline.config.registry import load_plugins
from pipeline.config.saved_jobs import job_from_yaml
from pipeline.runtime.errors import ConfigError, TrainingError, UserError, check_at_least
from pipeline.runtime.logs import Progress, progress, progress_as
from pipeline.runtime.process import agent, preemption
from pipeline.runtime.process.exit_codes import DONE, INTERRUPTED, REQUEUE
from pipeline.runtime.process.processes import end_with_parent
from pipeline.runtime.storage import storage

RECORD, ERROR, PROGRESS, OUTPUT = "record.json", "error.json", "progress.json", "output.txt"
LOOK_EVERY_S = 0.1
SHOWN_CHARACTERS = 3000  # of the end of the output, if the ranks fail


def count(ranks: int) -> int:
    """Return the job's world size. Raises ConfigError if this process is a rank already."""
    check_at_least("ranks", ranks, 1)
    joined = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1 and "RANK" in os.environ:
        raise ConfigError(
            f"ranks={ranks}: this process is one of {joined} rank(s) that a launcher started; leave it out"
        )
    return ranks if ranks > 1 else joined


def run(verb: str, job: Any, ranks: int, log_dir: str, verbose: bool) -> dict[str, Any]:
    """Return the values of rank 0's record. Raises the UserError of a rank, and RuntimeError for a bug."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        request = {"verb": verb, "job": yaml.safe_dump(asdict(job)), "plugins": list(job.plugins)}
        (folder / "request.json").write_text(json.dumps(request))
        paths = [path for path in sys.path if path]  # plugins, and the cells of a notebook
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks)),
            "LOGLEVEL": "WARNING",
        }
        command = [
            *(sys.executable, "-m", "pipeline.cli.api.ranks", "agent", "--nproc-per-node", str(ranks)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--max-restarts", "0"),
            *("--tee", "3", "--local-ranks-filter", "0", "--log-dir", log_dir, "--role", ""),
            *("-m", "pipeline.cli.api.ranks", str(folder / "request.json")),
        ]
        with (folder / OUTPUT).open("wb") as output:
            process = subprocess.Popen(command, env=environ, stdout=output, stderr=output, start_new_session=True)
        try:
            code = _wait(process, folder, verbose)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return _result(code, folder)


def _wait(process: subprocess.Popen[bytes], folder: Path, verbose: bool) -> int:
    """Wait for the agent. Pass SIGTERM and Ctrl-C on to it once: the ranks then save and end."""
    with ExitStack() as shown, (folder / OUTPUT).open("rb") as output:
        bar: tuple[str, float, Progress] | None = None
        asked = False
        while process.poll() is None:
            try:
                time.sleep(LOOK_EVERY_S)
                if verbose:
                    sys.stderr.write(output.read().decode(errors="replace"))
                bar = _show(folder / PROGRESS, bar, shown)
            except (KeyboardInterrupt, preemption.Preempted) as stop:
                if asked:
                    raise
                asked = True
                process.send_signal(signal.SIGINT if isinstance(stop, KeyboardInterrupt) else signal.SIGTERM)
        if verbose:
            sys.stderr.write(output.read().decode(errors="replace"))
    return process.returncode


def _show(file: Path, bar: tuple[str, float, Progress] | None, shown: ExitStack) -> tuple[str, float, Progress] | None:
    """Show what rank 0 has reported: description, done and total."""
    try:
        description, done, total = json.loads(file.read_text())
    except (OSError, ValueError):
        return bar
    if bar is None or bar[0] != description:
        shown.close()
        bar = (description, 0.0, shown.enter_context(progress(description, total)))
    bar[2].advance(done - bar[1])
    return description, done, bar[2]


def _result(code: int, folder: Path) -> dict[str, Any]:
    if (folder / ERROR).exists():
        kind, text = json.loads((folder / ERROR).read_text())
        raise _kinds().get(kind, UserError)(text)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code == REQUEUE:
        raise TrainingError("the ranks were stopped by SIGTERM; the same call resumes")
    if code != DONE or not (folder / RECORD).exists():
        said = (folder / OUTPUT).read_text(errors="replace")[-SHOWN_CHARACTERS:]
        raise RuntimeError(f"the ranks ended with code {code}:\n{said}")
    found: dict[str, Any] = json.loads((folder / RECORD).read_text())
    return found


def _kinds(kind: type[UserError] = UserError) -> dict[str, type[UserError]]:
    """Return the classes of errors by name."""
    found = {kind.__name__: kind}
    for each in kind.__subclasses__():
        found |= _kinds(each)
    return found


def _run_rank(path: str) -> None:
    """Run this rank of the request as a process of the verb."""
    folder, request = Path(path).parent, json.loads(Path(path).read_text())
    verb: Verb[Any, Any] = find_verb(request["verb"], []).verb  # type: ignore[attr-defined]

    def run(job: Any) -> Any:
        try:
            return verb.run(job)
        except UserError as error:
            storage.publish_text(str(folder / ERROR), json.dumps([type(error).__name__, str(error)]))
            raise

    def report(record: Any) -> str:
        storage.publish_text(str(folder / RECORD), json.dumps(asdict(record)))
        return ""

    verb.prepare_process()
    load_plugins(request["plugins"])
    job = job_from_yaml(verb.job, request["job"])
    job.world_size = int(os.environ["WORLD_SIZE"])
    with progress_as(str(folder / PROGRESS)):
        replace(verb, run=run, describe=report).run_as_process(job)


if __name__ == "__main__":
    if sys.argv[1] == "agent":
        end_with_parent()
        del sys.argv[1]
        agent.main()
    else:
        _run_rank(sys.argv[1])
