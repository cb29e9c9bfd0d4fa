"""A command line becomes a typed job, or one line that says what to write instead."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.cli import command_line
from pipeline.cli.command_line import load_config, print_user_errors
from pipeline.cli.verb import Verb
from pipeline.config import saved_jobs
from pipeline.config.jobs.evaluate import EvaluateJob
from pipeline.config.jobs.prepare import PrepareJob
from pipeline.config.jobs.train import TrainJob
from pipeline.data.dataset import FrequencyCurve, SparseFeature
from pipeline.embeddings.row_frequencies import merge_frequencies
from pipeline.runtime.errors import DataError
from pipeline.runtime.process.exit_codes import FAILED, USER_ERROR
from pipeline.training.preflight import validate_job
from tests.support.forks import WarmCommand
from tests.support.messages import mentions

QUICKSTART = "experiment=quickstart"


def _run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *argv: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["train", *argv])
    with pytest.raises(SystemExit) as stop:
        command_line.parse_command_line(
            TrainJob,
            "Train one model:  python -m pipeline train experiment=quickstart",
            validate=command_line.validate_train,
        )
    captured = capsys.readouterr()
    assert isinstance(stop.value.code, int)
    return stop.value.code, captured.out, captured.err


def test_help_lists_groups_options_and_keys(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = _run(capsys, monkeypatch, "--help")
    assert code == 0
    assert out.startswith("Train one model:")
    assert "model=        autoint bst dbmtl dcn dcnv2 deepfm dien din dlrm*" in out
    assert "quickstart_deepfm" in out and "global_batch_size" in out and "--config-dir DIR" in out


def test_help_of_a_verb_without_options_has_no_heading_for_them() -> None:
    assert "choose an option" not in command_line.help_text(EvaluateJob, "doc")


def test_cfg_prints_yaml_that_loads_as_the_job(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = _run(capsys, monkeypatch, "--cfg", QUICKSTART, "trainer.seed=5")
    assert code == 0
    assert saved_jobs.job_from_yaml(TrainJob, out) == load_config(TrainJob, [QUICKSTART, "trainer.seed=5"])


def test_an_error_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = _run(capsys, monkeypatch, "experiment=quickstrat")
    assert (code, out) == (2, "")
    assert mentions(err, "error: experiment=quickstrat") and err.count("\n") == 1
    code, _, err = _run(capsys, monkeypatch, QUICKSTART, "data.path=/nowhere/at/all")
    assert code == 2 and "python -m pipeline prepare data=quickstart" in err


def test_only_rank_0_says_the_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert _run(capsys, monkeypatch, "experiment=quickstrat") == (2, "", "")


@pytest.mark.parametrize("words", [["--help"], ["--cfg", QUICKSTART]], ids=["help", "cfg"])
def test_a_reader_that_has_seen_enough_is_no_error(words: list[str]) -> None:
    """As `python -m pipeline train --help | head -1`, of a reader that is gone before the first line."""
    reader, writer = os.pipe()
    os.close(reader)
    process = WarmCommand("pipeline train", words, output=(writer, (errors := os.memfd_create("errors"))))
    os.close(writer)
    assert process.wait(60) == 0
    assert os.pread(errors, 4000, 0) == b""


@pytest.fixture
def logging_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.cli.verb.configure_logging", lambda rank, log_format: None)


def _count_rows(job: PrepareJob) -> int:
    if job.source == "nothing":
        validate_job(load_config(TrainJob, [QUICKSTART, "data.path=/nowhere/at/all"]), 1)
    return 7


@pytest.mark.usefixtures("logging_untouched")
def test_a_verb_prints_what_came_of_it_on_rank_0_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank, printed in (("0", "7 rows\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setattr(sys, "argv", ["prepare", "data=quickstart", "source=x.tsv"])
        Verb(PrepareJob, _count_rows, "doc", lambda count: f"{count} rows").main()
        assert capsys.readouterr().out == printed


@pytest.mark.filterwarnings("ignore:Unable to enable fault handler")
@pytest.mark.usefixtures("logging_untouched")
def test_an_error_of_a_verb_reaches_the_user_and_torchrun(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["prepare", "data=quickstart", "source=nothing"])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit) as stop:
        Verb(PrepareJob, _count_rows, "doc").main()
    assert stop.value.code == 2
    assert mentions(capsys.readouterr().err, "error: dataset.json /nowhere/at/all")
    assert mentions((tmp_path / "error.json").read_text(), "dataset.json")


@pytest.mark.filterwarnings("ignore:Unable to enable fault handler")
@pytest.mark.usefixtures("logging_untouched")
def test_a_bug_inside_the_package_keeps_its_traceback_and_is_not_final(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """zip(strict=True) in a function of ours once ended as the user's one-line error, and the agent gave up."""
    feature = SparseFeature("f", 3, False, 1.0, FrequencyCurve([0, 1, 3], [0.0, 0.5, 1.0]))
    monkeypatch.setattr(sys, "argv", ["prepare", "data=quickstart", "source=x"])
    with pytest.raises(SystemExit) as stop:
        Verb(PrepareJob, lambda job: merge_frequencies([feature], [1.0, 2.0], {}), "doc").main()
    assert stop.value.code == FAILED
    err = capsys.readouterr().err
    assert "Traceback" in err and "row_frequencies.py" in err


def test_only_user_errors_become_one_line() -> None:
    with pytest.raises(ValueError, match="ours"), print_user_errors():
        raise ValueError("ours")
    with pytest.raises(SystemExit) as stop, print_user_errors():
        raise DataError("the user's")
    assert stop.value.code == USER_ERROR


def test_a_librarys_value_error_keeps_its_traceback() -> None:
    with pytest.raises(ValueError, match="invalid literal"), print_user_errors():
        int("x")


@pytest.mark.long
def test_a_wrong_command_fails_in_every_verb_before_torch_is_imported() -> None:
    """One process for all verbs: sys.modules would show what any of them imported."""
    code = (
        "import sys\n"
        "from pipeline.__main__ import main\n"
        "for verb in ('generate', 'prepare', 'plan', 'train', 'evaluate'):\n"
        "    try:\n"
        "        main([verb, 'nothing.like.this=1'])\n"
        "    except SystemExit as stop:\n"
        "        assert stop.code == 2, stop.code\n"
        "    else:\n"
        "        raise AssertionError(verb)\n"
        "heavy = {'torch', 'torchrec', 'pyarrow', 'duckdb', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("error: unknown key 'nothing'") == 5
