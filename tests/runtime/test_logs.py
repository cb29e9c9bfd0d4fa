"""metrics.jsonl survives what a crash leaves in it."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from pipeline.runtime import logs
from pipeline.runtime.logs import MetricsWriter
from tests.support.messages import mentions


def _steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("torn", ['{"kind": "train", "st', "\n\n", '{"kind": "train"}\n', "7\n", "null\n", "\x00" * 40])
def test_a_torn_or_blank_line_is_dropped_and_the_whole_lines_are_kept(tmp_path: Path, torn: str) -> None:
    """Such a line made every resume fail with a JSONDecodeError, until somebody edited the file."""
    writer = MetricsWriter(str(tmp_path))
    for step in (10, 20, 30):
        writer.write("train", step, {"loss": 0.5})
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    resumed = MetricsWriter(str(tmp_path), resume_step=20)
    assert _steps(tmp_path) == [10, 20]
    resumed.write("train", 30, {"loss": 0.4})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    resumed.drop_after(20)  # a rollback reads the same file
    resumed.close()
    assert _steps(tmp_path) == [10, 20]


def test_lines_after_the_resumed_step_are_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = MetricsWriter(str(tmp_path))
    for step in (10, 20):
        writer.write("train", step, {"loss": 0.5})
    writer.close()
    MetricsWriter(str(tmp_path), resume_step=10).close()
    assert _steps(tmp_path) == [10] and not caplog.messages
    MetricsWriter(str(tmp_path)).close()
    assert _steps(tmp_path) == []
    assert len(caplog.messages) == 1 and mentions(caplog.messages[0], "metrics.jsonl 10 no checkpoint step 0")


@pytest.mark.parametrize("tensorboard", [True, False])
def test_event_files_of_tensorboard_are_a_choice(tmp_path: Path, tensorboard: bool) -> None:
    writer = MetricsWriter(str(tmp_path), tensorboard=tensorboard)
    writer.write("train", 10, {"loss": 0.5})
    writer.drop_after(10)
    writer.close()
    assert _steps(tmp_path) == [10]
    assert (tmp_path / "tensorboard").exists() == tensorboard


def _scalars(folder: Path) -> dict[str, list[int]]:
    found = EventAccumulator(str(folder)).Reload()
    return {tag: [event.step for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_train_and_validation_share_a_chart_and_what_the_system_does_has_its_own(tmp_path: Path) -> None:
    writer = MetricsWriter(str(tmp_path), config={"optimizer.dense.lr": 0.25, "model.layers": [8, 1], "name": "clicks"})
    for step in (10, 20):
        writer.write("train", step, {"ne": 0.9, "click/ne": 0.9, "lr_sparse": 0.1, "samples_per_s": 7.0})
        writer.write("validation", step, {"ne": 0.8, "click/ne": 0.8})
    writer.drop_after(10)
    writer.write("train", 20, {"ne": 0.7})
    writer.close()
    train, validation = tmp_path / "tensorboard" / "train", tmp_path / "tensorboard" / "validation"
    shared = {"quality/ne": [10, 20], "click/ne": [10]}  # TensorBoard overlays the runs' charts of one tag
    assert _scalars(train) == {**shared, "learning_rate/sparse": [10], "system/samples_per_s": [10]}
    assert _scalars(validation) == {"quality/ne": [10, 20], "click/ne": [10, 20]}
    text = EventAccumulator(str(train)).Reload().Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "optimizer.dense.lr: 0.25" in text and "model.layers: [8, 1]" in text
    started = EventAccumulator(str(validation)).Reload().summary_metadata["_hparams_/session_start_info"]
    told = HParamsPluginData.FromString(started.plugin_data.content).session_start_info.hparams
    assert told["optimizer.dense.lr"].number_value == 0.25 and told["name"].string_value == "clicks"
    shown = EventAccumulator(str(validation)).Reload().summary_metadata["_hparams_/experiment"]
    metrics = HParamsPluginData.FromString(shown.plugin_data.content).experiment.metric_infos
    assert {metric.name.tag for metric in metrics} == {"quality/ne", "click/ne"}


def test_a_long_task_writes_lines_though_it_does_not_advance(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logs, "PLAIN_LINE_EVERY_S", 0.01)
    with logs.progress("searching a plan", 4) as bar:
        bar.advance(1)
        text = ""
        while text.count("\n") < 2:
            text += capsys.readouterr().err
    writers = [thread for thread in threading.enumerate() if thread.name == "progress"]
    for writer in writers:
        writer.join(60)
    assert "searching a plan: 25 % after" in text and not any(writer.is_alive() for writer in writers)
