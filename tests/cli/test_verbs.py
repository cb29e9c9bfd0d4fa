"""Every verb is known by one file, and reads its command line by one grammar."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeline import __main__ as top
from pipeline.cli import interrupt, registry
from pipeline.cli.command_line import Command, load_config, read_arguments
from pipeline.cli.verb import verb
from pipeline.config import registry as components
from pipeline.config.jobs.evaluate import EvaluateJob
from pipeline.config.jobs.job import CONFIG_NAMES
from pipeline.config.jobs.prepare import GenerateJob, PrepareJob
from pipeline.config.jobs.train import TrainJob
from pipeline.extras.checkpoints.cli import checkpoints
from pipeline.runtime.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]
VERBS = {
    "agent",
    "calibrate",
    "check_nodes",
    "checkpoints",
    "completion",
    "doctor",
    "erase",
    "evaluate",
    "explain",
    "export",
    "generate",
    "init",
    "inspect",
    "join_labels",
    "plan",
    "precompile",
    "predict",
    "prepare",
    "publish",
    "registry",
    "report",
    "retrain",
    "runs",
    "select_features",
    "semantic_ids",
    "serve",
    "skew",
    "sweep",
    "train",
}


@dataclass
class EchoJob:
    text: str = "???"
    times: int = 1


@pytest.fixture
def echo() -> Iterator[None]:
    verb("echo", EchoJob, describe=str, doc="Print a text:  python -m pipeline echo text=a")(
        lambda job: job.text * job.times
    )
    yield
    del components._components["verb"]["echo"], CONFIG_NAMES[EchoJob]


def test_all_verbs_are_listed_with_what_they_do(capsys: pytest.CaptureFixture[str]) -> None:
    top.main([])
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert {name for name, _ in lines} >= VERBS
    assert all(text and not text.startswith("Turn") for _, text in lines)


def test_the_list_takes_no_torch() -> None:
    text = "import sys; from pipeline.__main__ import main; main([]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", text], stdout=subprocess.DEVNULL).returncode == 0


def test_the_list_ends_with_commands_of_a_first_model_that_compose() -> None:
    commands = [line.split()[3:] for line in top.FIRST_STEPS if line.startswith("  python -m pipeline ")]
    jobs = {"generate": GenerateJob, "prepare": PrepareJob, "train": TrainJob, "evaluate": EvaluateJob}
    made: dict[str, Any] = {verb: load_config(jobs[verb], words) for verb, *words in commands}
    assert list(made) == list(jobs)
    assert made["prepare"].source == made["generate"].output
    assert (made["train"].data.name, made["evaluate"].run) == ("quickstart", made["train"].run_dir)


def test_the_form_of_earlier_releases_names_the_new_one() -> None:
    done = subprocess.run([sys.executable, "-m", "pipeline.train", "experiment=q"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "") and "type `python -m pipeline train`" in done.stderr
    assert {file.stem for file in (REPOSITORY / "pipeline").glob("*.py")} == {"__init__", "__main__"}


@pytest.mark.usefixtures("echo")
def test_a_verb_of_ones_own_needs_no_other_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.cli.verb.configure_logging", lambda rank, log_format: None)
    top.main(["echo", "text=ab", "times=2"])
    assert capsys.readouterr().out == "abab\n"
    with pytest.raises(SystemExit) as stop:
        top.main(["echo", "txt=ab"])
    assert stop.value.code == 2 and "'text'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        top.main(["echo", "--help"])
    assert "python -m pipeline echo text=a" in capsys.readouterr().out


@pytest.mark.usefixtures("echo")
def test_ctrl_c_before_a_job_is_there_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pipeline.cli.verb.parse_command_line", interrupted)
    with pytest.raises(SystemExit) as stop:
        top.main(["echo", "text=ab"])
    assert stop.value.code == 130 and capsys.readouterr().err == "\ninterrupted\n"
    interrupt.end_quietly(KeyboardInterrupt, KeyboardInterrupt(), None)  # while modules are imported
    assert capsys.readouterr().err == "\ninterrupted\n"
    interrupt.end_quietly(ValueError, ValueError("a bug"), None)
    assert "a bug" in capsys.readouterr().err


def test_an_unknown_verb_or_plugin_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words, named in (
        (["trian"], "did you mean 'train'?"),
        (["train", "plugins=[no_such_package]"], "'no_such_package'"),
    ):
        with pytest.raises(SystemExit) as stop:
            top.main(words)
        (line,) = capsys.readouterr().err.splitlines()
        assert stop.value.code == 2 and named in line


@pytest.mark.parametrize(
    ("words", "commands", "overrides"),
    [
        (["--config-dir", "my", "runs/q"], checkpoints.COMMANDS, ["command=list", "run=runs/q", "--config-dir=my"]),
        (["runs/q", "--config-dir=my"], checkpoints.COMMANDS, ["command=list", "run=runs/q", "--config-dir=my"]),
        (["show", "390", "runs/q"], checkpoints.COMMANDS, ["command=show", "run=runs/q", "step='390'"]),
        (["show", "390"], checkpoints.COMMANDS, ["command=show", "run='390'"]),
        (["rollback", "dt=3/r", "v000012"], registry.COMMANDS, None),
        (["registry/dt=3", "history"], registry.COMMANDS, ["command=history", "registry='registry/dt=3'"]),
        (
            ["rollback", "--config-dir", "my", "reg", "v000012", "reason=bad"],
            registry.COMMANDS,
            ["command=rollback", "registry=reg", "version=v000012", "reason=bad", "--config-dir=my"],
        ),
        (["a=1", "--cfg"], (), ["a=1", "--cfg"]),
    ],
)
def test_one_grammar_reads_every_command_line(
    words: list[str], commands: tuple[Command, ...], overrides: list[str] | None
) -> None:
    if overrides is not None:
        assert read_arguments(words, commands, "list").overrides() == overrides
    else:  # key=value, as it looks
        assert "dt=3/r" in read_arguments(words, commands, "list").settings


def test_a_word_too_many_names_what_the_command_takes() -> None:
    with pytest.raises(ConfigError, match=r"'b'.*show RUN STEP"):
        read_arguments(["show", "a", "b"], checkpoints.COMMANDS, "list")
    with pytest.raises(ConfigError, match=r"'exprot'.*'export'"):
        read_arguments(["exprot", "runs/q"], checkpoints.COMMANDS, "list")


def test_checkpoints_takes_a_config_dir_in_two_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the folder was taken for a run, and the run for a word too many."""
    monkeypatch.setattr(sys, "argv", [*sys.argv])  # which a verb sets, and commands that are printed later read
    with pytest.raises(SystemExit) as stop:
        top.main(["checkpoints", "--config-dir", str(tmp_path), "runs/absent"])
    assert stop.value.code == 2 and "runs/absent/checkpoints" in capsys.readouterr().err
