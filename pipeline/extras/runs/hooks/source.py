"""Keep in the run folder what a training was started from: the user's conf/, the files of plugins,
and the versions of the code, so that `train from=RUN` can train the run again elsewhere.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

import pipeline
from pipeline.checkpoint.checkpointer import library_versions
from pipeline.config.jobs.train import TrainJob
from pipeline.config.registry import register
from pipeline.data.dataset import load_dataset
from pipeline.extras.runs.folder import FACTS, PLUGINS, SOURCE, open_run
from pipeline.runtime.errors import DataError, UserError
from pipeline.runtime.logs import get_logger, to_json
from pipeline.training.hooks.base import Hook, TrainingState
from pipeline.training.hooks.record import commit_of, commit_of_package, differences

AGAIN = "again"  # how the training compares with the run that it trains again
PROJECT = "commit of the project"  # for the reader: the files of plugins are compared instead
MAX_FILE_BYTES = 1 << 20
logger = get_logger("pipeline.train")


@register("hook", "source")
class KeptSource(Hook):
    """Write <run_dir>/source at each start. If the job trains another run again, log what differs from it."""

    runs_after = "record"

    def on_train_start(self, state: TrainingState) -> None:
        if self.parts.writer is None:
            return
        folder = Path(self.job.run_dir, SOURCE)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        if conf := _config_dir(sys.argv):
            _copy(conf, [*conf.glob("*.yaml"), *conf.glob("*/*.yaml")], folder / "conf")
        for name in self.job.plugins:
            _keep_plugin(name, Path(self.job.run_dir, PLUGINS))
        facts = _facts(self.job, self.parts.context.world_size)
        if self.job.from_run and not state.step:
            facts[AGAIN] = describe_again(self.job, facts)
            logger.info("again       %s", facts[AGAIN])
        Path(self.job.run_dir, FACTS).write_text(to_json(facts, indent=1))


def _config_dir(argv: list[str]) -> Path | None:
    """Return the folder that the command line gave as --config-dir."""
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--config-dir=") else [word])]
    following = words[words.index("--config-dir") + 1 :] if "--config-dir" in words else []
    return Path(following[0]) if following else None


def _facts(job: TrainJob, num_ranks: int) -> dict[str, Any]:
    """Return what the bits of a training depend on in addition to its config."""
    return {
        "data set": _fingerprint(job.data.path),
        "pipeline": commit_of_package() or pipeline.__version__,
        "plugins": _digest(Path(job.run_dir, PLUGINS)),
        PROJECT: commit_of(Path.cwd()),
        "ranks": num_ranks,
        "threads": torch.get_num_threads(),
        "CPU": _cpu(),
        **library_versions(),
    }


def _fingerprint(path: str) -> str:
    try:
        return load_dataset(path).fingerprint()[:12]
    except DataError:  # a reader of the caller's own
        return ""


def _digest(folder: Path) -> str:
    """Return a digest of the names and the content of all files."""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{file.relative_to(folder)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _keep_plugin(name: str, target: Path) -> None:
    """Copy the loaded Python files of the plugin's project: its module and what it imports from the
    same folder. Installed packages and the pipeline itself are left out.
    """
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        return
    root = Path(file).resolve().parents[name.count(".") + (Path(file).name == "__init__.py")]
    installed = [Path(pipeline.__file__).parent, Path(sys.prefix), Path(sys.base_prefix)]
    left_out = [folder.resolve() for folder in installed]
    # torch has modules whose __file__ does not exist
    files = (Path(found).resolve() for each in list(sys.modules.values()) if (found := getattr(each, "__file__", None)))
    own = [path for path in set(files) if path.suffix == ".py" and path.is_relative_to(root) and path.is_file()]
    _copy(root, [path for path in own if not any(path.is_relative_to(each) for each in left_out)], target)


def _copy(root: Path, files: list[Path], target: Path) -> None:
    for file in files:
        if file.stat().st_size <= MAX_FILE_BYTES:
            (to := target / file.relative_to(root)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, to)


def describe_again(job: TrainJob, facts: dict[str, Any]) -> str:
    """Say whether this training should give the bits of the run that it repeats."""
    run = open_run(str(job.from_run))
    try:
        changed = [f"{key}={now} (the run: {then})" for key, (then, now) in differences(job, run.config).items()]
    except UserError as error:
        return f"trains {run.path}, which cannot be compared: {error}"
    before = run.facts
    kept = {key: now for key, now in facts.items() if key != PROJECT and before.get(key, now) != now}
    changed += [f"{key} {now} (the run: {before[key]})" for key, now in kept.items()]
    if not before:
        return f"trains {run.path}, which has no {FACTS} to compare this machine with"
    if not changed:
        return f"trains {run.path} with the same config, data set, code, libraries, ranks and CPU: expect equal bits"
    return f"trains {run.path}; its bits may differ, because these differ: {'; '.join(changed)}"
