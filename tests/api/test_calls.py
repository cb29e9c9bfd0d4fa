"""The functions of the API do what the verbs do, and leave the process as it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pipeline
from pipeline.checkpoint.chains import open_step
from pipeline.runtime import logs
from pipeline.runtime.errors import ConfigError, TrainingError
from pipeline.training.run_state import folder_of
from tests.api.process import changes, held
from tests.support.forks import run_warm
from tests.support.messages import names

SMALL = [
    "experiment=quickstart",
    "hardware=cpu",
    "trainer.global_batch_size=256",
    "trainer.max_steps=4",
    "trainer.evaluate_batch_size=512",
    "trainer.evaluate_max_batches=1",
]


def words(data: str, run: object) -> list[str]:
    return [*SMALL, f"data.path={data}", f"run_dir={run}"]


def weights(run: object) -> dict[str, torch.Tensor]:
    """The tensors of the newest step."""
    _, _, tensors = open_step(folder_of(str(run)), None)
    return {key: tensors.read(key, [0] * len(tensors.shape(key)), tensors.shape(key)) for key in tensors.entries}


def assert_same(first: object, second: object) -> None:
    a, b = weights(first), weights(second)
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_importing_the_package_imports_neither_torch_nor_hydra() -> None:
    heavy = "{'torch', 'hydra', 'pyarrow', 'numpy'}"
    text = f"import sys, pipeline; dir(pipeline); sys.exit(bool({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_a_job_is_composed_of_words_or_of_values() -> None:
    job = pipeline.compose("train", SMALL, name="it's", **{"trainer.seed": 3})
    same = pipeline.compose("train", [*SMALL, "name='it\\'s'", "trainer.seed=3"])
    assert job == same and job.trainer.seed == 3 and job.name == "it's"
    values = {"experiment": "quickstart", "tables.cat_3.embedding_dim": 4, "plugins": [], "trainer.max_steps": None}
    assert pipeline.compose("train", values).tables["cat_3"].embedding_dim == 4
    with pytest.raises(ConfigError, match=names("traiin train")):
        pipeline.compose("traiin")  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match=names("trainer.epoch trainer.epochs")):
        pipeline.compose("train", {"trainer.epoch": 1})


@pytest.mark.long
def test_a_training_has_the_bits_of_the_command_and_leaves_nothing(
    prepared_clicks: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = pipeline.compose("train", words(prepared_clicks, tmp_path / "warm"))
    pipeline.train(job)  # libraries make their pools
    before = held()
    torch.manual_seed(5)
    state = torch.get_rng_state()
    capfd.readouterr()
    summary = pipeline.train(pipeline.compose("train", words(prepared_clicks, tmp_path / "run")))
    assert changes(before, held()) == {} and capfd.readouterr() == ("", "")
    assert torch.equal(torch.get_rng_state(), state)
    assert summary.step == 4 and summary.validation["auc"] > 0.5
    assert "step 4" in (tmp_path / "run" / "train.log").read_text()
    done = run_warm("pipeline", "train", *words(prepared_clicks, tmp_path / "command"))
    assert done.returncode == 0, done.stderr
    assert_same(tmp_path / "run", tmp_path / "command")


@pytest.mark.long
def test_ctrl_c_saves_and_raises_and_the_same_call_resumes(
    prepared_clicks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline.training.hooks import record

    signal.signal(signal.SIGINT, signal.default_int_handler)
    job = pipeline.compose("train", words(prepared_clicks, tmp_path / "run"))
    before, described = held(), record.describe_start

    def interrupt(step: int, world_size: int) -> dict[str, object]:
        if step == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return described(step, world_size)

    monkeypatch.setattr(record, "describe_start", interrupt)
    with pytest.raises(KeyboardInterrupt):
        pipeline.train(job)
    assert changes(before, held(), ("tasks",)) == {}
    assert pipeline.Run(str(tmp_path / "run")).metrics("train").num_rows == 0
    monkeypatch.undo()
    assert pipeline.train(job).step == 4
    pipeline.train(pipeline.compose("train", words(prepared_clicks, tmp_path / "whole")))
    assert_same(tmp_path / "run", tmp_path / "whole")


@pytest.mark.long
def test_sigterm_reaches_the_handler_of_the_script_after_the_save(
    prepared_clicks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline.training.hooks import record

    told: list[bool] = []
    saved = tmp_path / "run" / "checkpoints"
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(any(saved.glob("step_*"))))
    described = record.describe_start

    def terminate(step: int, world_size: int) -> dict[str, object]:
        os.kill(os.getpid(), signal.SIGTERM)
        return described(step, world_size)

    monkeypatch.setattr(record, "describe_start", terminate)
    with pytest.raises(TrainingError, match=names("SIGTERM resumes")):
        pipeline.train(pipeline.compose("train", words(prepared_clicks, tmp_path / "run")))
    assert told == [True]


def test_errors_are_user_errors_and_leave_nothing(tmp_path: Path) -> None:
    pipeline.compose("train", SMALL)
    before = held()
    for call in (
        lambda: pipeline.train(pipeline.compose("train", words(str(tmp_path / "none"), tmp_path / "run"))),
        lambda: pipeline.evaluate(str(tmp_path / "none")),
        lambda: pipeline.export(str(tmp_path / "none")),
        lambda: pipeline.inspect(str(tmp_path / "none.csv")),
        lambda: pipeline.Run(str(tmp_path / "none")),
        lambda: pipeline.Runs(str(tmp_path / "none")),
        lambda: pipeline.Artifact(str(tmp_path / "none")),
        lambda: pipeline.Dataset(str(tmp_path / "none")),
        lambda: pipeline.train(pipeline.compose("train", SMALL), ranks=0),
    ):
        with pytest.raises(pipeline.UserError):
            call()
    assert changes(before, held()) == {}


def test_progress_is_one_line_in_a_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    with logs.progress_as(logs.BAR), logs.progress("reading", 10) as bar:
        bar.advance(5)
    shown = capsys.readouterr().err
    assert shown.startswith("\rreading  50 %") and "\n" not in shown and shown.endswith("\r")
    with logs.progress_as(logs.NONE), logs.progress("reading", 10) as bar:
        bar.advance(5)
    assert capsys.readouterr().err == ""
