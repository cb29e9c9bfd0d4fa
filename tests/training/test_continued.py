"""A run folder that holds a run: what another job changes is said, refused where nothing can be trained, and written by steps alone."""

from __future__ import annotations

import json
import logging
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint.steps import list_steps
from pipeline.cli.command_line import load_config, validate_train
from pipeline.config.jobs.evaluate import ExportJob
from pipeline.config.jobs.train import TrainJob
from pipeline.runtime.errors import TrainingError, UserError
from pipeline.runtime.storage.signature import requiring
from pipeline.serving.artifact.export import export
from pipeline.serving.scoring.predictor import Predictor
from pipeline.training import summary as train_summary
from pipeline.training.hooks.record import describe_differences, differences
from pipeline.training.summary import TrainSummary
from pipeline.training.train import train
from tests.runtime.test_signature import make_keys
from tests.support.forks import WarmCommand
from tests.support.jobs import evaluate_on_rank
from tests.support.messages import mentions, names
from tests.support.ranks import RankPool

SMALL = ["experiment=quickstart", "hardware=cpu", "trainer.global_batch_size=256", "trainer.evaluate_max_batches=1"]


def _job(data: str, run_dir: Path, *overrides: str) -> list[str]:
    return [*SMALL, f"data.path={data}", f"run_dir={run_dir}", *overrides]


def _train(rank: int, overrides: list[str]) -> TrainSummary:
    logging.getLogger("pipeline").setLevel(logging.INFO)
    return train(load_config(TrainJob, overrides))


def _told_by_train(rank: int, overrides: list[str]) -> list[dict[str, Any]]:
    """What the log lines of a training say as fields, in order."""
    told: list[dict[str, Any]] = []
    keep = logging.Handler()
    keep.emit = lambda record: told.append(vars(record).get("fields", {}))
    logging.getLogger("pipeline").addHandler(keep)
    try:
        _train(rank, overrides)
    finally:
        logging.getLogger("pipeline").removeHandler(keep)
    return [each for each in told if each]


def _contents(run_dir: Path) -> dict[str, bytes]:
    """Without the lease and the log, which say who asked when."""
    files = [file for file in run_dir.rglob("*") if file.is_file()]
    kept = [file for file in files if ".lease" not in file.parts and file.name != "train.log"]
    return {str(file.relative_to(run_dir)): file.read_bytes() for file in kept}


@pytest.fixture(scope="module")
def finished(ranks: RankPool, prepared_clicks: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "finished"
    ranks.run(1, _train, _job(prepared_clicks, run_dir, "trainer.max_steps=3"))
    return run_dir


@pytest.mark.long
def test_a_finished_run_refuses_other_rates_and_nothing_of_it_changes(
    ranks: RankPool, prepared_clicks: str, finished: Path
) -> None:
    before = _contents(finished)
    other = ["trainer.max_steps=3", "optimizer.dense.lr=0.5", "trainer.precision=bf16"]
    with pytest.raises(RuntimeError, match=names("optimizer.dense.lr=0.5 0.003 trainer.precision=bf16 fp32 run_dir")):
        ranks.run(1, _train, _job(prepared_clicks, finished, *other))
    assert _contents(finished) == before
    again = ranks.run(1, _train, _job(prepared_clicks, finished, "trainer.max_steps=2", "logger.tensorboard=false"))[0]
    assert _contents(finished) == before
    assert mentions(train_summary.describe(again), f"nothing left {finished} step 3")
    assert mentions((finished / "train.log").read_text(), "ignores trainer.max_steps=2")


@pytest.mark.long
def test_a_resumed_run_says_from_where_and_with_what_else_it_goes_on(
    ranks: RankPool, prepared_clicks: str, tmp_path: Path
) -> None:
    ranks.run(1, _train, _job(prepared_clicks, tmp_path, "trainer.max_steps=2"))
    more = ["trainer.max_steps=4", "optimizer.dense.lr=0.002", "tables.cat_0.init.kind=normal"]
    loaded, resumed = ranks.run(1, _told_by_train, _job(prepared_clicks, tmp_path, *more))[0]
    assert (loaded["event"], loaded["step"]) == ("loaded", 2) and loaded["seconds"] >= 0
    assert Path(loaded["checkpoint"]) == tmp_path / "checkpoints" / "step_00000002"
    assert resumed == {"event": "resumed", "step": 2, "steps_to_go": 2, "saved_by_ranks": 1}
    log = (tmp_path / "train.log").read_text()
    assert mentions(
        log, "resumed step 2 1 rank torch 2 steps optimizer.dense.lr=0.002 0.003 tables.cat_0.init.kind=normal"
    )
    assert log.index("continues with") < log.index("ignores tables.cat_0")
    assert "lr: 0.002" in (tmp_path / "config.yaml").read_text()
    first, second = (json.loads(line) for line in (tmp_path / "starts.jsonl").read_text().splitlines())
    assert (first["from_step"], second["from_step"], second["world_size"]) == (0, 2, 1)
    assert second.keys() >= {"time", "attempt", "command", "host", "version", "commit"}


def test_rows_of_another_order_are_refused_before_torch(prepared_clicks: str, finished: Path) -> None:
    words = [*SMALL[:2], f"data.path={prepared_clicks}", f"run_dir={finished}", "trainer.global_batch_size=512"]
    with pytest.raises(TrainingError, match=names("global_batch_size=256 512 run_dir")):
        validate_train(load_config(TrainJob, words))


def test_what_changes_no_result_is_no_difference(prepared_clicks: str, finished: Path) -> None:
    manifest = json.loads((finished / "checkpoints" / "step_00000003" / "manifest.json").read_text())
    words = _job(prepared_clicks, Path("elsewhere"), "trainer.max_steps=3", "name=other", "hardware=cpu_8gb")
    job = load_config(TrainJob, [*words, "checkpoint.keep_last_n=5"])
    assert {key: pair for key, pair in differences(job, manifest["config"]).items() if "init" not in key} == {}
    found = {f"optimizer.key_{index}": (0, index) for index in range(1, 11)}
    assert mentions(describe_differences(found)[0], "optimizer.key_8=8 2 more")


@pytest.mark.long
def test_ctrl_c_saves_the_next_step_and_says_what_there_is(prepared_clicks: str, tmp_path: Path) -> None:
    words = _job(prepared_clicks, tmp_path / "run", "trainer.epochs=9", "trainer.log_every_steps=1")
    process = WarmCommand("pipeline train", words)
    for line in process.stderr:
        if "step 3/" in line:
            break
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=300)
    assert process.returncode == 130
    (step,) = list_steps(str(tmp_path / "run" / "checkpoints"))
    assert "Traceback" not in rest and mentions(rest, f"Ctrl-C step {step} saved again")


def test_ctrl_c_before_the_first_step_says_that_nothing_is_saved(prepared_clicks: str, tmp_path: Path) -> None:
    process = WarmCommand("pipeline train", _job(prepared_clicks, tmp_path / "run", "trainer.epochs=9"))
    for line in process.stderr:
        if "rank(s) on this host" in line:
            break
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "Traceback" not in rest and mentions(rest, f"nothing saved {tmp_path}/run/checkpoints from the beginning")


@pytest.mark.long
def test_steps_are_signed_and_only_what_a_key_vouches_for_is_resumed(
    ranks: RankPool, prepared_clicks: str, tmp_path: Path
) -> None:
    (private, public), (_, other) = make_keys(tmp_path, "own"), make_keys(tmp_path, "other")
    words = _job(prepared_clicks, tmp_path / "run", "logger.report=false", f"checkpoint.sign_key={private}")
    ranks.run(1, _train, [*words, "trainer.max_steps=1"])
    words += ["trainer.max_steps=2"]
    with pytest.raises(RuntimeError, match=names("step_00000001 signed another key")):
        ranks.run(1, _train, [*words, f"checkpoint.require_signature={other}"])
    assert ranks.run(1, _train, [*words, f"checkpoint.require_signature={public}"])[0].step == 2
    measured = [f"run={tmp_path}/run", "split=validation", "max_batches=1"]
    with pytest.raises(RuntimeError, match=names("step_00000002 signed another key")):
        ranks.run(1, evaluate_on_rank, [*measured, f"require_signature={other}"])
    config = tmp_path / "run/config.yaml"
    config.write_text(re.sub(r"layer_sizes: \[\d+", "layer_sizes: [7", config.read_text()))  # another model
    assert ranks.run(1, evaluate_on_rank, [*measured, f"require_signature={public}"])[0].step == 2
    with pytest.raises(UserError, match=names("step_00000002 signed another key")):
        export(load_config(ExportJob, [f"run={tmp_path}/run", f"require_signature={other}"]))


@pytest.mark.campaign
def test_a_signed_run_is_exported_signed_and_loaded_by_the_key(
    ranks: RankPool, prepared_clicks: str, tmp_path: Path
) -> None:
    private, public = make_keys(tmp_path, "own")
    words = _job(prepared_clicks, tmp_path / "run", "logger.report=false", f"checkpoint.sign_key={private}")
    ranks.run(1, _train, [*words, "trainer.max_steps=1"])
    signed = [f"sign_key={private}", f"require_signature=[{public}]", f"run={tmp_path}/run", "parity.max_rows=100"]
    made = export(load_config(ExportJob, [*signed, f"output={tmp_path}/artifact"]))
    with requiring(public):
        assert Predictor.load(made.artifact).version == made.version
