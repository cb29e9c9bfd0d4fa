"""The core works without the extras: a copy of the tree without them imports, trains, evaluates, exports and plans."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.own_folder import REPOSITORY

COPIED = ("pipeline", "launch", "conf", "sharding_plans")
PROGRAM = """
import importlib, pkgutil
import pipeline
assert pipeline.__path__[0].startswith({folder!r}), pipeline.__path__
for package in pkgutil.iter_modules(pipeline.__path__):
    if package.ispkg and package.name not in ("conf", "sharding_plans"):  # other modules are names of verbs
        module = importlib.import_module("pipeline." + package.name)
        for each in pkgutil.walk_packages(module.__path__, module.__name__ + "."):
            importlib.import_module(each.name)

from pipeline.cli.command_line import load_config
from pipeline.cli.generate import generate
from pipeline.cli.plan import plan
from pipeline.cli.verbs import find_verb, import_verbs
from pipeline.config.jobs.evaluate import EvaluateJob, ExportJob
from pipeline.config.jobs.prepare import GenerateJob, PrepareJob
from pipeline.config.jobs.retrain import RetrainJob
from pipeline.config.jobs.train import PlanJob, TrainJob
from pipeline.config.registry import components, from_extra
from pipeline.data.prepare.run import prepare
from pipeline.runtime.errors import ConfigError
from pipeline.serving.artifact.export import export
from pipeline.training.evaluate import evaluate
from pipeline.training.hooks.base import hook_names
from pipeline.training.train import train

verbs = import_verbs()
assert "train" in verbs and "report" not in verbs and not components("stream")
data = ["data=quickstart", "data.synthetic.num_rows=20000"]
generate(load_config(GenerateJob, [*data, "output=rows.tsv"]))
prepare(load_config(PrepareJob, [*data, "source=rows.tsv"]))
small = ["experiment=quickstart", "hardware=cpu", "trainer.global_batch_size=256", "trainer.max_steps=4"]
train(load_config(TrainJob, small))
assert evaluate(load_config(EvaluateJob, ["run=runs/quickstart"])).metrics
export(load_config(ExportJob, ["run=runs/quickstart", "output=artifact", "precision=int8"]))
plan(load_config(PlanJob, [*small, "world_size=2", "planner.plan_file=plan.json"]))
try:
    train(load_config(TrainJob, [*small, "publishing.when=every_minute", "run_dir=runs/published"]))
except ConfigError as error:
    assert "publishing.when=every_minute needs an extra" in str(error)
else:
    raise AssertionError("publishing.when was taken")
try:
    find_verb("report", [])
except ConfigError as error:
    assert "pipeline/extras/runs" in str(error)
else:
    raise AssertionError("report was found")
try:
    from_extra("follow", "follow=true")
except ConfigError as error:
    assert "follow=true needs an extra" in str(error)
try:
    hook_names(load_config(TrainJob, [*small, "profile=steps:1-2"]))
except ConfigError as error:
    assert "profile=steps:1-2 needs an extra" in str(error)
else:
    raise AssertionError("profile was taken")
try:
    load_config(RetrainJob, ["experiment=quickstart", "source=x", "follow=true"])
except ConfigError as error:
    assert "stream.kind='folder'" in str(error)
else:
    raise AssertionError("follow=true was taken")
"""


@pytest.mark.long
def test_the_core_works_without_the_extras(tmp_path: Path) -> None:
    for name in COPIED:
        shutil.copytree(
            REPOSITORY / name, tmp_path / name, ignore=shutil.ignore_patterns("extras")
        )  # compiled kernels too
    shutil.copy(REPOSITORY / "setup.cfg", tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    program = PROGRAM.format(folder=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
