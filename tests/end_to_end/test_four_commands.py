"""From an unknown file to a trained model: inspect, init, prepare, train."""

from __future__ import annotations

import gzip
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from pipeline.cli.command_line import load_config
from pipeline.cli.inspect import inspect
from pipeline.config.jobs.prepare import InspectJob, PrepareJob
from pipeline.config.jobs.train import TrainJob
from pipeline.data.prepare.run import prepare
from pipeline.extras.project.cli.init import InitJob, init, with_answers
from pipeline.extras.project.defaults import choose_batch_size, choose_model, estimate_rows
from pipeline.extras.sweep.config import SweepJob
from pipeline.runtime import shell_words
from pipeline.runtime.errors import ConfigError
from tests.support.jobs import train_on_rank
from tests.support.messages import names
from tests.support.ranks import RankPool

SAMPLES = (*(pytest.param(name, marks=pytest.mark.campaign) for name in ("open_bandit", "ml100k")), "criteo")


def _source(sample: str, samples: Path, folder: Path) -> Path:
    if sample == "ml100k":
        script = samples / "ml100k" / "make.py"
        subprocess.run([sys.executable, script, folder / "made"], check=True, capture_output=True)
        return folder / "made" / "by_time.csv"
    return samples / {"open_bandit": "open_bandit_random_men.csv", "criteo": "criteo_kaggle_head10k.txt"}[sample]


def _project(source: Path, folder: Path, label: str | None = None) -> tuple[Path, str]:
    words = [f"source={source}", f"output={folder}/data.yaml", "data_name=mine", *([f"label={label}"] if label else [])]
    inspect(load_config(InspectJob, words))
    init(load_config(InitJob, [f"folder={folder}/project", f"data={folder}/data.yaml", f"source={source}"]))
    return folder / "project", "mine"


def test_a_project_composes_and_nothing_in_it_is_overwritten(tmp_path: Path) -> None:
    source = tmp_path / "rows.csv"
    source.write_text("click,item\n" + "".join(f"{number % 3 == 0:d},i{number % 5}\n" for number in range(300)))
    project, name = _project(source, tmp_path)
    conf = f"--config-dir={project}/conf"
    job = load_config(TrainJob, [conf, f"experiment={name}"])
    assert (job.name, job.data.columns.sparse, job.model.kind) == (name, ["item"], "dlrm_dcn")
    assert job.trainer.global_batch_size == 64
    assert list(load_config(SweepJob, [conf, f"experiment={name}", "sweep=rates"]).sweep.params)
    makefile = (project / "Makefile").read_text()
    for words, run in (
        ([], "mine"),
        (["WORDS=debug=limit"], "mine_debug_limit"),
        (["WORDS=a=1 run_dir=runs/b"], "b"),
        (["RUN=runs/c"], "c"),
    ):
        made = subprocess.run(
            ["make", "-n", "prepare", "train", "export", *words],
            cwd=project,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert all(
            f"runs/{run} " in made.replace("\n", " ").split(verb)[1] for verb in (" train ", " evaluate ", " export ")
        )
        assert "debug=limit" not in made.split(" train ")[0] and "run_dir" not in made.split(" train ")[0]
    assert f"SOURCE ?= {source}" in makefile and "\tPYTHONPATH=.:$(PYTHONPATH) $(PYTHON) -m pipeline train" in makefile
    compile((project / "my_model.py").read_text(), "my_model.py", "exec")
    with pytest.raises(ConfigError, match=names("not empty")):
        _project(source, tmp_path)
    (tmp_path / "odd.yaml").write_text("a: 1\n")
    with pytest.raises(ConfigError, match=names("odd.yaml name format")):
        init(load_config(InitJob, [f"folder={tmp_path}/other", f"data={tmp_path}/odd.yaml", f"source={source}"]))


def test_the_model_and_the_batch_of_a_project_follow_its_data(tmp_path: Path) -> None:
    assert [choose_batch_size(rows) for rows in (None, 300, 100_000, 1e9)] == [256, 64, 256, 1024]
    few, many = ({"format": "csv", "columns": {"sparse": ["c"], "dense": ["x"] * number}} for number in (2, 5))
    assert choose_model(few) == ("dcnv2", {"dropout": 0.0, "batch_norm": False})
    assert choose_model(many) == choose_model({"format": "criteo_tsv"}) == ("dlrm_dcn", {})
    assert choose_model({"format": "csv", "columns": {"dense": ["x"]}}) == ("autoint", {})
    table = pa.table({"click": [0, 1] * 40_000, "item": [f"i{number % 500}" for number in range(80_000)]})
    pq.write_table(table, tmp_path / "rows.parquet")
    pa.csv.write_csv(table, tmp_path / "rows.csv")
    (tmp_path / "rows.csv.gz").write_bytes(gzip.compress((tmp_path / "rows.csv").read_bytes()))
    for name in ("rows.parquet", "rows.csv", "rows.csv.gz"):
        rows = estimate_rows(str(tmp_path / name), {"format": name.split(".")[1]})
        assert rows == pytest.approx(80_000, rel=0.1), name
    assert estimate_rows(str(tmp_path / "absent.csv"), {"format": "csv"}) is None


def test_a_project_with_blanks_in_its_paths_has_commands_that_can_be_run(tmp_path: Path) -> None:
    folder = tmp_path / "my shop"
    folder.mkdir()
    source = folder / "clicks, #1 $new.csv"
    source.write_text("click,item\n" + "".join(f"{number % 3 == 0:d},i{number % 5}\n" for number in range(300)))
    quoted = shell_words.word("source", source)
    assert quoted in inspect(
        load_config(InspectJob, [*shlex.split(quoted), f"output={folder}/data.yaml", "data_name=mine"])
    )
    words = [f"folder={folder}/project", f"data={folder}/data.yaml", *shlex.split(quoted)]
    assert f"cd '{folder}/project' && make" in init(load_config(InitJob, words))
    plain = {
        name: value for name, value in os.environ.items() if not name.startswith("MAKE")
    }  # `make test` is a make too
    for windows, expected in (("windows", f"{folder}/project/windows"), ("s3://logs/clicks", "s3://logs/clicks")):
        shown = subprocess.run(
            ["make", "-n", "prepare", "schedule", f"WINDOWS={windows}"],
            cwd=folder / "project",
            env=plain,
            capture_output=True,
            check=True,
            text=True,
        ).stdout.splitlines()
        prepare, schedule = (shlex.split(line) for line in shown)
        conf = ["--config-dir", "conf"]
        assert load_config(PrepareJob, [f"--config-dir={folder}/project/conf", *prepare[6:]]).source == str(source)
        assert prepare[4:6] == conf and f'source="{expected}"' in schedule and f"{folder}/project/conf" in schedule


def test_what_is_missing_is_asked_for_and_the_file_is_inspected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my rows.csv").write_text(
        "a,b,item\n" + "".join(f"{n % 3 == 0:d},{n % 2},i{n % 5}\n" for n in range(300))
    )
    asked: list[str] = []
    answers = {"rows": "my rows.csv", "config": "", "label": "b", "folder": "shop"}

    def ask(question: str, default: str) -> str:
        asked.append(question)
        return next(answer for word, answer in answers.items() if word in question.lower()) or default

    words = with_answers([], ask)
    assert len(asked) == 4 and with_answers(words, ask) == words and len(asked) == 4
    job = load_config(InitJob, [word for word in words if not word.startswith("--")])
    assert (job.folder, job.data, job.source) == ("shop", "my rows.yaml", "my rows.csv")
    init(job)
    assert "label: b" in (tmp_path / "shop/conf/data/my_rows.yaml").read_text()


@pytest.mark.long
@pytest.mark.parametrize("sample", SAMPLES)
def test_four_commands_train_a_model_on_a_real_sample(
    ranks: RankPool, samples: Path, tmp_path: Path, sample: str
) -> None:
    source = _source(sample, samples, tmp_path)
    project, name = _project(source, tmp_path, "click" if sample == "ml100k" else None)
    conf = f"--config-dir={project}/conf"
    prepared = prepare(
        load_config(PrepareJob, [conf, f"data={name}", f"source={source}", f"data.path={tmp_path}/prepared"])
    )
    summary = ranks.run(
        1,
        train_on_rank,
        [
            conf,
            f"experiment={name}",
            f"data.path={prepared.path}",
            f"run_dir={tmp_path}/run",
            "hardware=cpu",
            "logger.tensorboard=false",
        ],
    )[0]
    print(sample, (tmp_path / "data.yaml").read_text(), summary.validation)
    assert Path(summary.report).stat().st_size > 10_000
    if sample != "open_bandit":  # its random policy's clicks are hardly to be told from these columns
        assert summary.validation["auc"] > 0.6
