"""Fault 29: a plan file, a saved config, a data set's description or a vocabulary cannot make a job run or tell anything."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from omegaconf import OmegaConf

from pipeline.checkpoint.warm_start_policy import RowMap
from pipeline.cli.command_line import load_config
from pipeline.cli.plan import plan
from pipeline.config.jobs.evaluate import EvaluateJob
from pipeline.config.jobs.train import PlanJob, TrainJob
from pipeline.data.dataset import load_dataset
from pipeline.extras.checkpoints.cli.checkpoints import export_checkpoint, show_checkpoint
from pipeline.extras.checkpoints.config import CheckpointsJob
from pipeline.planner.plan_codec import read_plan
from pipeline.runtime.errors import CheckpointError, ConfigError, DataError
from pipeline.training.plan_job import check, diff, show
from pipeline.training.preflight import validate_job
from pipeline.training.run_state import folder_of, load_trained_job
from tests.faults.conftest import FaultRecorder
from tests.faults.hostile import Call, calling, change_json

SECRET = "s3cr3t-of-the-environment"


# --- saved config: evaluation, warm start (the other run's) and the checkpoints verb read it


def _config_readers(run: Path) -> dict[str, Callable[[], object]]:
    evaluating = load_config(EvaluateJob, [f"run={run}"])
    showing = load_config(CheckpointsJob, [f"run={run}", "command=show"])
    return {
        "evaluate": lambda: load_trained_job(evaluating),
        "warm start": lambda: folder_of(str(run)),
        "checkpoints": lambda: show_checkpoint(showing),
    }


def _hostile_configs(canary: Path, config: str) -> dict[str, str]:
    def with_value(key: str, value: object) -> str:
        content = yaml.safe_load(config)
        section, _, name = key.rpartition(".")
        (content[section] if section else content)[name] = value
        return yaml.safe_dump(content)

    tag = f'!!python/object/apply:os.system ["touch {canary}"]'
    return {
        "python tag": config.replace("name: quickstart", f"name: {tag}", 1),
        "python name": config.replace("name: quickstart", "name: !!python/name:os.system", 1),
        "python module": f"{config}\nx: !!python/module:antigravity\n",
        "_target_": with_value("model._target_", "os.system"),
        "_target_ at the top": with_value("_target_", "os.system"),
        "_partial_ call": with_value("optimizer", {"_target_": "os.system", "command": f"touch {canary}"}),
        "environment": with_value("name", "${oc.env:FAULT_SECRET}"),
        "environment in a number": with_value("trainer.seed", "${oc.env:FAULT_SECRET}"),
        "escaped interpolation": config.replace("name: quickstart", 'name: "\\x24{oc.env:FAULT_SECRET}"', 1),
        "custom resolver": with_value("run_dir", f"${{canary:{canary}}}"),
        "nested resolver": with_value("data.path", f"a/${{oc.decode:'${{canary:{canary}}}'}}"),
        "no mapping": "- a\n- b\n",
    }


def test_no_saved_config_runs_or_tells_anything(
    small_run: Path, tmp_path: Path, fault: FaultRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    canary, count = tmp_path / "canary", 0
    monkeypatch.setenv("FAULT_SECRET", SECRET)
    OmegaConf.register_new_resolver("canary", lambda path: Path(path).touch() or path)
    try:
        run = Path(shutil.copytree(small_run, tmp_path / "run"))
        readers = _config_readers(run)
        for name, content in _hostile_configs(canary, (small_run / "config.yaml").read_text()).items():
            assert content != (small_run / "config.yaml").read_text(), name
            (run / "config.yaml").write_text(content)
            for reader, read in readers.items():
                try:  # warm starts and checkpoints read single values of the file as plain text
                    said, refused = str(read()), reader != "evaluate"
                except ConfigError as error:
                    said, refused = str(error), True
                assert refused and SECRET not in said and not canary.exists(), f"{name}: {reader}"
                count += 1
    finally:
        OmegaConf.clear_resolver("canary")
    fault(
        29,
        f"saved configs (tags, _target_, resolvers) x {', '.join(readers)}: refused or read as text, no secret told",
        count=count,
    )


# --- plan file: plan show, diff and check, planner=file of plan and of train


@pytest.fixture(scope="module")
def planned(prepared_clicks: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A plan file and the words of its job."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    words = ["experiment=quickstart", "hardware=cpu", f"data.path={prepared_clicks}", f"planner.plan_file={path}"]
    plan(load_config(PlanJob, words))
    return path, words


def _hostile_plans(canary: Path, text: str) -> dict[str, bytes]:
    def with_change(change: Callable[[dict], None]) -> bytes:
        content = json.loads(text)
        change(content)
        return json.dumps(content).encode()

    harm = {"_target_": "os.system", "_args_": [f"touch {canary}"]}

    def first(content: dict) -> dict:
        return next(iter(next(iter(content["plan"].values())).values()))

    return {
        "pickle": calling("os", "system", f"touch {canary}"),
        "pickled plan": pickle.dumps(Call(__import__("os").system, f"touch {canary}")),
        "yaml tag": f'!!python/object/apply:os.system ["touch {canary}"]'.encode(),
        "_target_ in a table": with_change(lambda content: first(content).update(harm)),
        "_target_ for a table": with_change(lambda content: content["tables"].__setitem__(0, harm)),
        "_target_ at the top": with_change(lambda content: content.update(tables=harm)),
        "class by name": with_change(lambda content: first(content).update(__class__="os.system")),
        "call as placement": with_change(
            lambda content: first(content).update(ranks=[f"__import__('os').system('touch {canary}')"])
        ),
        "no object": b"[]",
    }


def test_no_plan_file_runs_anything(planned: tuple[Path, list[str]], tmp_path: Path, fault: FaultRecorder) -> None:
    (path, words), canary, count = planned, tmp_path / "canary", 0
    hostile = tmp_path / "hostile.json"
    job_words = [*words[:-1], f"planner.plan_file={hostile}", "planner=file"]
    planned_job, plan_job, train_job = (
        load_config(PlanJob, words),
        load_config(PlanJob, job_words),
        load_config(TrainJob, job_words),
    )
    readers: dict[str, Callable[[], object]] = {
        "plan show": lambda: show(str(hostile)),
        "plan diff": lambda: diff(str(path), str(hostile)),
        "plan check": lambda: check(str(hostile), planned_job),
        "plan planner=file": lambda: plan(plan_job),
        "train planner=file": lambda: (validate_job(train_job, 1), read_plan(str(hostile))),
    }
    for name, content in _hostile_plans(canary, path.read_text()).items():
        hostile.write_bytes(content)
        refused = 0
        for reader, read in readers.items():
            try:
                read()
            except ValueError:
                refused += 1
            assert not canary.exists(), f"{name}: {reader}"
            count += 1
        assert refused >= 3, f"{name}: what needs the shards must refuse it"  # show and diff read less of it
    fault(29, f"plan files x {', '.join(readers)}: canary untouched", count=count)


# --- dataset.json and vocabularies: validation and readers; warm start and export


def test_no_dataset_json_runs_anything(prepared_clicks: str, tmp_path: Path, fault: FaultRecorder) -> None:
    data, canary, count = Path(shutil.copytree(prepared_clicks, tmp_path / "data")), tmp_path / "canary", 0
    good = (data / "dataset.json").read_text()
    harm = {"_target_": "os.system", "_args_": [f"touch {canary}"]}
    hostile: dict[str, Callable[[], object]] = {
        "pickle": lambda: (data / "dataset.json").write_bytes(calling("os", "system", f"touch {canary}")),
        "yaml tag": lambda: (data / "dataset.json").write_text(f'!!python/object/apply:os.system ["touch {canary}"]'),
        "_target_": lambda: change_json(data / "dataset.json", lambda content: content.update(harm)),
        "feature": lambda: change_json(data / "dataset.json", lambda content: content.update(sparse_features=[harm])),
        "split": lambda: change_json(data / "dataset.json", lambda content: content.update(splits=harm)),
    }
    job = load_config(TrainJob, ["experiment=quickstart", f"data.path={data}"])
    for name, plant in hostile.items():
        (data / "dataset.json").write_text(good)
        plant()
        for read in (lambda: load_dataset(str(data)), lambda: validate_job(job, 1)):
            with pytest.raises(ValueError):
                read()
            assert not canary.exists(), name
            count += 1
    fault(29, "dataset.json (pickle, tag, _target_): refused, canary untouched", count=count)


def test_no_vocabulary_runs_anything(
    small_run: Path, prepared_clicks: str, tmp_path: Path, fault: FaultRecorder
) -> None:
    """pyarrow would once unpickle what a file's extension type held."""
    data, canary, count = Path(shutil.copytree(prepared_clicks, tmp_path / "data")), tmp_path / "canary", 0
    path = data / "vocabulary" / "cat_25.parquet"
    good = pq.read_table(path)
    extension = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": calling("os", "system", f"touch {canary}"),
    }

    def export() -> None:
        words = [
            f"run={small_run}",
            "command=export",
            "table=cat_25",
            f"output={tmp_path}/x.parquet",
            f"data_path={data}",
        ]
        export_checkpoint(load_config(CheckpointsJob, words))

    def warm_start() -> None:
        RowMap(f"{prepared_clicks}/vocabulary/cat_25.parquet", str(path)).pairs(0, 10, 10)

    schema = pa.schema([good.schema.field("value").with_metadata(extension), *list(good.schema)[1:]])
    pq.write_table(good.cast(schema), path)
    assert pq.read_schema(path).field("value").metadata[b"ARROW:extension:name"] == b"arrow.py_extension_type"
    warm_start()  # the values are as good as any; the type is not made
    with pytest.raises(DataError, match="prepare"):  # export compares the file with dataset.json first
        export()
    assert not canary.exists()
    count += 2
    path.write_bytes(calling("os", "system", f"touch {canary}"))
    for read in (export, warm_start):
        with pytest.raises((CheckpointError, DataError), match="prepare"):
            read()
        assert not canary.exists()
        count += 1
    fault(29, "vocabularies (pickled extension type, pickle) x export, warm start: canary untouched", count=count)
