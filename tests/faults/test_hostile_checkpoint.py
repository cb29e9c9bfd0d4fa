"""Fault 27: whatever a step's files ask to be run, on whatever way they are read, does not run."""

from __future__ import annotations

import logging
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.checkpoint.owners import HEADER_BYTES
from pipeline.cli.command_line import load_config
from pipeline.config.jobs.evaluate import EvaluateJob
from pipeline.config.jobs.train import TrainJob
from pipeline.extras.checkpoints.cli.checkpoints import export_checkpoint, show_checkpoint, verify_checkpoints
from pipeline.extras.checkpoints.config import CheckpointsJob
from pipeline.training.evaluate import evaluate
from pipeline.training.train import train
from tests.faults.conftest import FaultRecorder
from tests.faults.hostile import archive, pickles, replace_and_seal
from tests.support.ranks import RankPool

SMALL = [
    "experiment=quickstart",
    "hardware=cpu",
    "trainer.global_batch_size=256",
    "trainer.evaluate_max_batches=1",
    "tables.cat_25.sharding.sharding_types=[row_wise]",
    "tables.cat_24.sharding.sharding_types=[table_wise]",
]


def _export(run: Path) -> None:
    words = [f"run={run}", "command=export", "table=cat_25", f"output={run}/x.parquet"]
    export_checkpoint(load_config(CheckpointsJob, words))


def _verify(run: Path) -> None:
    if problem := verify_checkpoints(load_config(CheckpointsJob, [f"run={run}", "command=verify"]))[30]:
        raise ValueError(problem)


def _show(run: Path) -> None:
    show_checkpoint(load_config(CheckpointsJob, [f"run={run}", "command=show"]))


VERBS: dict[str, Callable[[Path], None]] = {"verify": _verify, "show": _show, "export": _export}
ON_RANKS = ("resume", "evaluate", "warm start")


def _only_step(small_run: Path, folder: Path) -> tuple[Path, Path]:
    """A copy of the run with its last step alone, and that step."""
    run = Path(shutil.copytree(small_run, folder))
    for step in (10, 20):
        shutil.rmtree(run / "checkpoints" / f"step_{step:08d}")
    return run, run / "checkpoints" / "step_00000030"


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.campaign)])
def test_no_pickle_in_the_place_of_metadata_is_run_by_the_checkpoints_verb(
    small_run: Path, tmp_path: Path, fault: FaultRecorder, every: int
) -> None:
    canary, count = tmp_path / "canary", 0
    run, step = _only_step(small_run, tmp_path / "run")
    payloads = list(pickles(canary).items())[::every]
    for name, content in payloads:
        replace_and_seal(step, ".metadata", content)
        for verb, call in VERBS.items():
            with pytest.raises(ValueError):
                call(run)
            assert not canary.exists(), f"{name} ran: {verb}"
            count += 1
    fault(27, f"{len(payloads)} payloads x verify, show, export: refused, canary untouched", count=count)


def test_the_payloads_do_run_where_nothing_restrains_them(tmp_path: Path) -> None:
    """Else the tests above would show nothing."""
    ran = 0
    for name, content in pickles(tmp_path / "canary").items():
        canary = tmp_path / "canary"
        if "pty" in name:
            continue  # it would take the terminal
        try:
            found = pickle.loads(content)
        except Exception:  # after it ran, or because a module has no such name here
            found = None
        if name == "os.popen" and found is not None:
            found.read()
        ran += canary.exists()
        if canary.is_dir():
            canary.rmdir()
        canary.unlink(missing_ok=True)
    assert ran >= 11


def _read_on_rank(rank: int, way: str, run: str, data: str, folder: str) -> str:
    logging.disable(logging.WARNING)
    try:
        if way == "evaluate":
            evaluate(load_config(EvaluateJob, [f"run={run}", "max_batches=1"]))
        elif way == "resume":
            train(load_config(TrainJob, [*SMALL, f"data.path={data}", f"run_dir={run}", "trainer.max_steps=31"]))
        else:
            words = [*SMALL, f"data.path={data}", f"run_dir={folder}", "trainer.max_steps=1"]
            train(load_config(TrainJob, [*words, f"warm_start.checkpoint={run}/checkpoints/step_00000030"]))
    except ValueError as error:
        return str(error)
    finally:
        logging.disable(logging.NOTSET)
    return "it was read"


@pytest.mark.long
def test_no_file_of_a_step_runs_anything_on_resume_evaluation_and_warm_start(
    ranks: RankPool, small_run: Path, prepared_clicks: str, tmp_path: Path, fault: FaultRecorder
) -> None:
    canary, count = tmp_path / "canary", 0
    payloads = {".metadata": pickles(canary)["inside Metadata"], "__0_0.distcp": archive(canary)}
    for file, content in payloads.items():
        for way in ON_RANKS:
            run, step = _only_step(small_run, tmp_path / f"{file}.{way}")
            path = next(step.glob(file), step / file)
            if file != ".metadata":  # where every tensor's archive begins, a hostile one that is not longer
                owner, old = path.read_bytes()[:HEADER_BYTES], path.read_bytes()[HEADER_BYTES:]
                content = owner + (content + old[len(content) :])[: len(old)]
            replace_and_seal(step, path.name, content)
            (message,) = ranks.run(
                1, _read_on_rank, way, str(run), prepared_clicks, str(tmp_path / f"new.{file}.{way}")
            )
            assert message != "it was read", f"{way} {file}"
            assert not canary.exists(), f"{way} {file}"
            count += 1
    fault(27, f".metadata and a tensor's file x {', '.join(ON_RANKS)}: refused, canary untouched", count=count)
