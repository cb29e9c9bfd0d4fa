"""`train from=RUN` trains a colleague's run again from its folder: equal bits in another folder, clone and user."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.train import PlanJob, TrainJob
from pipeline.config.registry import load_plugins
from pipeline.extras.runs.hooks import source
from pipeline.runtime.errors import ConfigError
from tests.support.jobs import train_on_rank
from tests.support.messages import mentions
from tests.support.own_folder import REPOSITORY
from tests.support.ranks import RankPool
from tests.support.stored_tensors import step_tensors


def _differing(a: Path, b: Path, step: int) -> list[str]:
    """Return the tensors whose bits differ between two runs, and check that there are any tensors."""
    first, second = step_tensors(a, step), step_tensors(b, step)
    assert len(first) > 20 and first.keys() == second.keys()
    return [key for key, value in first.items() if not torch.equal(value, second[key])]


@pytest.mark.long
def test_a_run_is_trained_again_from_a_copy_of_its_folder(
    small_run: Path, prepared_clicks: str, ranks: RankPool, tmp_path: Path
) -> None:
    theirs, data, mine = tmp_path / "theirs" / "run", tmp_path / "my_data", tmp_path / "mine"
    shutil.copytree(small_run, theirs)
    shutil.copytree(prepared_clicks, data)
    config = (theirs / "config.yaml").read_text()
    (theirs / "config.yaml").write_text(config.replace(prepared_clicks, "/home/colleague/data"))
    # their folders may not be written to by this training, and their plan is not the plan of a search
    before = {path: path.stat().st_mtime_ns for path in theirs.rglob("*")}
    ranks.run(2, train_on_rank, [f"from={theirs}", f"data.path={data}", f"run_dir={mine}"])
    assert _differing(theirs, mine, 30) == []
    assert {path: path.stat().st_mtime_ns for path in theirs.rglob("*")} == before
    plans = [json.loads((run / "plan.json").read_text()) for run in (theirs, mine)]
    assert plans[0]["plan"] == plans[1]["plan"]
    assert "expect equal bits" in json.loads((mine / "source" / "facts.json").read_text())["again"]
    # other data of the same columns, and another rate, are named
    line = source.describe_again(
        load_config(TrainJob, [f"from={theirs}", "optimizer.dense.lr=0.5"]), {"data set": "other", "ranks": 2}
    )
    assert mentions(line, "optimizer.dense.lr=0.5 data set other") and "ranks" not in line


def test_only_the_folders_of_a_training_are_its_own(small_run: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "x"
    theirs.mkdir()
    text = (small_run / "config.yaml").read_text()
    assert "folder: null" in text and "artifact: null" in text
    text = text.replace("folder: null", "folder: /theirs/checkpoints").replace("artifact: null", "artifact: /theirs/a")
    (theirs / "config.yaml").write_text(text)
    job = load_config(TrainJob, [f"from={theirs}", "paths.root=/mine", "trainer.seed=5"])
    assert (job.run_dir, job.checkpoint.folder, job.publishing.artifact) == ("/mine/runs/x_again", None, None)
    assert (job.from_run, job.trainer.seed, job.world_size) == (str(theirs), 5, 1)
    assert job.tables["cat_25"].sharding.sharding_types == ["row_wise"]
    (theirs / "config.yaml").write_text(re.sub("(?m)^run_dir: .*", f"run_dir: {theirs}", text))
    assert load_config(TrainJob, [f"from={theirs}", "run_dir=/mine/again"]).from_run == str(theirs)
    with pytest.raises(ConfigError, match="set single keys instead of model=fm"):
        load_config(TrainJob, [f"from={theirs}", "model=fm"])
    with pytest.raises(ConfigError, match=r"from=.* is for train"):
        load_config(PlanJob, [f"from={theirs}"])
    with pytest.raises(ConfigError, match="choose another run_dir"):
        load_config(TrainJob, [f"from={theirs}", f"run_dir={theirs}/"])
    with pytest.raises(ConfigError, match="is not a run folder"):
        load_config(TrainJob, [f"from={tmp_path}"])


def test_code_of_a_run_folder_runs_only_if_the_user_names_it(
    small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, theirs = tmp_path / "project", tmp_path / "x"
    (project / "shop_again").mkdir(parents=True)
    (project / "shop_again" / "__init__.py").write_text("import shop_again_helper\n")
    (project / "shop_again_helper.py").write_text("LOADED = True\n")
    (project / "not_loaded.py").write_text("")
    monkeypatch.syspath_prepend(str(project))
    load_plugins(["shop_again"])
    source._keep_plugin("shop_again", theirs / "source" / "plugins")
    kept = sorted(str(path.relative_to(theirs)) for path in theirs.rglob("*.py"))
    assert kept == ["source/plugins/shop_again/__init__.py", "source/plugins/shop_again_helper.py"]
    for name in ("shop_again", "shop_again_helper"):
        monkeypatch.delitem(sys.modules, name)
    text = (small_run / "config.yaml").read_text()
    (theirs / "config.yaml").write_text(text.replace("plugins: []", "plugins: [shop_again]"))
    with pytest.raises(ConfigError) as refused:
        load_config(TrainJob, [f"from={theirs}"])
    assert mentions(refused.value, f"plugins=[shop_again] PYTHONPATH={theirs}/source/plugins")
    assert "shop_again" not in sys.modules


@pytest.mark.campaign  # two trainings in new processes, of which one has to compile the kernels of a new clone
def test_a_colleagues_run_with_a_plugin_gives_equal_bits_in_another_clone(prepared_clicks: str, tmp_path: Path) -> None:
    clone, project, other = tmp_path / "clone", tmp_path / "project", tmp_path / "other"
    subprocess.run(["git", "clone", "-q", "--no-hardlinks", REPOSITORY, clone], check=True)
    (project / "conf" / "experiment").mkdir(parents=True)
    experiment = "# @package _global_\ndefaults: [{override /data: quickstart}]\nname: mine\n"
    (project / "conf" / "experiment" / "mine.yaml").write_text(experiment)
    shutil.copy(REPOSITORY / "examples" / "custom_model.py", project / "gated.py")
    other.mkdir()

    def train(folder: Path, python_path: list[Path], words: list[str]) -> str:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, python_path)), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pipeline", "train", *words]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stderr

    words = ["--config-dir", "conf", "experiment=mine", "plugins=[gated]", "model=gated_mlp", "model.hidden=48"]
    sizes = [f"data.path={prepared_clicks}", "trainer.global_batch_size=256", "trainer.max_steps=12"]
    train(project, [REPOSITORY, project], [*words, *sizes, "run_dir=runs/mine"])
    shutil.copytree(project / "runs" / "mine", other / "theirs")
    shutil.copytree(prepared_clicks, other / "data")
    shutil.rmtree(project)
    assert (other / "theirs" / "source" / "conf" / "experiment" / "mine.yaml").read_text() == experiment
    log = train(
        other, [clone, other / "theirs" / "source" / "plugins"], ["from=theirs", "plugins=[gated]", "data.path=data"]
    )
    assert "trains theirs" in log
    assert _differing(other / "theirs", other / "runs" / "theirs_again", 12) == []
