"""Every file under conf/ composes, presets carry their references' numbers, and no typo gets as far as torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml
from omegaconf import DictConfig

from pipeline.cli import compose
from pipeline.cli.command_line import load_config
from pipeline.config.data import check_batch_geometry
from pipeline.config.jobs.evaluate import EvaluateJob, ExportJob, PredictJob, ServeJob
from pipeline.config.jobs.prepare import GenerateJob, PrepareJob
from pipeline.config.jobs.retrain import RetrainJob
from pipeline.config.jobs.train import PlanJob, TrainJob
from pipeline.extras.publish.job import PublishJob
from pipeline.extras.sweep.config import SweepJob
from pipeline.models.dlrm import DLRMConfig, DLRMDCNConfig
from pipeline.runtime.errors import ConfigError
from tests.support.sources import shipped_options

CONF = Path(__file__).resolve().parents[2] / "conf"
FOLDERS = compose.config_folders()


def text_of(name: str) -> str:
    """A YAML file of conf/ or of an extra."""
    return next(path for folder in FOLDERS if (path := folder / f"{name}.yaml").is_file()).read_text()


GROUPS = shipped_options()

# mlcommons/training, recommendation_v2/torchrec_dlrm/README.MD
MLPERF_ROWS = [
    40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209, 11938, 155, 4, 976,
    14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36,
]  # fmt: skip
MLPERF_MULTI_HOT = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1]
KAGGLE_ROWS = [
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
]  # fmt: skip
CRITEO_1TB_ROWS = [
    227605432, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 130229467, 3067956, 405282, 10, 2209, 11938, 155, 4, 976,
    14, 292775614, 40790948, 187188510, 590152, 12973, 108, 36,
]  # fmt: skip


def _rows(job: TrainJob) -> list[int | None]:
    return [job.tables[f"cat_{index}"].num_embeddings for index in range(26)]


@cache
def _experiment(name: str) -> TrainJob:
    return load_config(TrainJob, [f"experiment={name}"])


@pytest.mark.long
@pytest.mark.parametrize("experiment", GROUPS["experiment"])
def test_every_experiment_trains_under_its_own_name(experiment: str) -> None:
    job = _experiment(experiment)
    assert (job.name, job.run_dir) == (experiment, f"runs/{experiment}")
    assert job.hardware.compute_device == "auto"  # it trains on GPUs and on CPUs by the same command


def test_a_plan_has_the_name_of_its_experiment_and_hardware() -> None:
    planned = load_config(PlanJob, ["experiment=criteo_kaggle_dlrm", "hardware=h200", "world_size=8"])
    assert planned.planner.plan_file == "sharding_plans/criteo_kaggle_dlrm.h200x8.json"


@pytest.mark.parametrize("experiment", GROUPS["experiment"])
def test_every_experiment_begins_with_the_command_that_runs_it(experiment: str) -> None:
    package, command, *_ = text_of(f"experiment/{experiment}").splitlines()
    assert package == "# @package _global_"  # Hydra reads it from the first line only
    assert command == f"# python -m pipeline train experiment={experiment}"


# The groups that a train job lacks, or that want more words, with a job that has them.
WANTED = {
    RetrainJob: ["data=quickstart", "source=x"],
    ExportJob: ["run=x"],
    PredictJob: ["artifact=x", "source=x", "output=x.csv"],
    PublishJob: ["artifact=x"],
    ServeJob: ["artifact=x"],
    PrepareJob: ["data=quickstart", "source=x", "vocabularies.path=y"],
    TrainJob: ["data.name=mine", "warm_start.run=x"],
    SweepJob: ["data.name=mine"],
}
JOB_OF = {
    **dict.fromkeys(("windows", "growth", "checks", "gate", "registry", "stream"), RetrainJob),
    **dict.fromkeys(("pruning", "parity", "retrieval", "calibration", "card"), ExportJob),
    "retrieve": PredictJob,
    "delta_gate": PublishJob,
    **dict.fromkeys(("ssd", "server", "batching", "limits"), ServeJob),
    "vocabularies": PrepareJob,
    "sweep": SweepJob,
}


def _choices() -> list[tuple[type, dict[str, str]]]:
    """Options of all groups of a job at once, for composing takes a third of a second; each option is in one of them."""
    groups: dict[type, dict[str, list[str]]] = {}
    for group, options in GROUPS.items():
        if group not in ("experiment", "early_stop"):  # they set values of other groups; each has a test
            groups.setdefault(JOB_OF.get(group, TrainJob), {})[group] = options
    return [
        (job, {group: options[index % len(options)] for group, options in own.items()})
        for job, own in groups.items()
        for index in range(max(map(len, own.values())))
    ]


@pytest.mark.long
@pytest.mark.parametrize(("job_type", "chosen"), _choices())
def test_every_option_of_every_group_composes(job_type: type, chosen: dict[str, str]) -> None:
    words = [f"{group}={option}" for group, option in chosen.items()]
    job = load_config(job_type, [*WANTED[job_type], *words])
    assert isinstance(job, job_type)
    for group, option in chosen.items():
        stated = yaml.safe_load(text_of(f"{group}/{option}"))
        part = job if group == "debug" else getattr(job, group)
        for key in set(stated or {}) - {"defaults"}:
            assert key in part if isinstance(part, dict) else hasattr(part, key)


@pytest.mark.parametrize("data", [option for option in GROUPS["data"] if option != "default"])
def test_every_data_set_prepares(data: str) -> None:
    source = "data.split.train=train.csv" if data.startswith("ml100k") else "source=raw/*"  # its splits are given
    job = load_config(PrepareJob, [f"data={data}", source])
    assert (job.data.name, job.data.path) == (data, f"datasets/{data}")


def test_the_other_verbs_compose() -> None:
    assert load_config(GenerateJob, ["data=quickstart"]).output == "datasets/raw/quickstart.tsv"
    assert load_config(EvaluateJob, ["run=runs/quickstart"]).split == "test"


@pytest.mark.long
def test_the_same_choices_are_composed_once_until_a_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = Path(shutil.copytree(CONF, tmp_path / "conf"))
    composed: list[list[str]] = []

    def compose_by_hydra(name: str, folders: list[Path], choices: list[str]) -> DictConfig:
        composed.append(choices)
        return by_hydra(name, folders, choices)

    by_hydra = compose._compose_by_hydra
    monkeypatch.setattr(compose, "_compose_by_hydra", compose_by_hydra)
    monkeypatch.setattr(compose, "config_folders", lambda config_dir: [conf])
    words = ["data=quickstart", "source=x"]
    first = load_config(PrepareJob, [*words, "threads=3", "data.feature_ids.cat_1.min_frequency=4"])
    first.data.feature_ids.clear()
    second = load_config(PrepareJob, words)
    assert (first.threads, second.threads, second.data.feature_ids) == (3, None, {})
    assert load_config(GenerateJob, words[:1]).data.name == "quickstart"
    assert composed == [["data=quickstart"]] * 2  # of a prepare job, and of a generate job
    file = conf / "data" / "quickstart.yaml"
    file.write_text(file.read_text().replace("name: quickstart", "name: another"))
    assert load_config(PrepareJob, words).data.name == "another"


def test_one_key_moves_every_folder() -> None:
    trained = load_config(TrainJob, ["experiment=quickstart", "paths.root=/mnt/x/"])
    assert (trained.run_dir, trained.data.path) == ("/mnt/x/runs/quickstart", "/mnt/x/datasets/quickstart")
    assert trained.planner.plan_file == "/mnt/x/sharding_plans/quickstart.autox1.json"
    retrained = load_config(RetrainJob, ["experiment=quickstart", "source=x", "paths.root=/mnt/x"])
    assert (retrained.run_dir, retrained.registry.path) == (
        "/mnt/x/retraining/quickstart",
        "/mnt/x/registry/quickstart",
    )
    assert load_config(GenerateJob, ["data=quickstart", "paths.root=.."]).output == "../datasets/raw/quickstart.tsv"
    assert load_config(GenerateJob, ["data=quickstart", "paths.data=d"]).output == "d/raw/quickstart.tsv"
    assert load_config(TrainJob, ["experiment=quickstart", "paths.runs=r"]).run_dir == "r/quickstart"


@pytest.mark.parametrize("experiment", GROUPS["experiment"])
def test_every_experiment_runs_on_the_ranks_of_its_hardware(experiment: str) -> None:
    job = _experiment(experiment)
    most = 128 if experiment in ("criteo_1tb_dlrm", "mlperf_dlrmv2") else 16
    for num_ranks in (1, 2, 4, 8, 16, 32, 64, 128):
        if num_ranks <= most:
            check_batch_geometry(job.trainer.micro_batch_size, job.data.reader.num_streams, num_ranks)


@pytest.mark.parametrize("metric", GROUPS["early_stop"])
def test_early_stop_is_one_setting(metric: str) -> None:
    job = load_config(TrainJob, ["experiment=quickstart", f"early_stop={metric}"])
    assert (job.early_stop_metric, job.plateau_metric, job.best_metric) == (metric,) * 3
    assert (job.trainer.epochs, job.trainer.evaluate_every_epochs, job.trainer.early_stop.patience) == (100, 1, 4)
    assert (job.checkpoint.save_best, job.schedule.plateau.patience, job.schedule.plateau.factor) == (True, 2, 0.1)


@pytest.mark.parametrize("option", GROUPS["debug"])
def test_debugging_is_short_and_leaves_the_runs_own_folder_alone(option: str) -> None:
    job = load_config(TrainJob, ["experiment=quickstart", f"debug={option}"])
    assert job.run_dir == f"runs/quickstart_debug_{option}"
    assert job.trainer.max_steps is not None and job.trainer.max_steps <= 200
    assert job.trainer.overfit_batches == (1 if option == "overfit" else 0)


def test_mlperf_dlrmv2_is_the_references_model_data_and_optimizer() -> None:
    job = load_config(TrainJob, ["experiment=mlperf_dlrmv2"])
    assert _rows(job) == MLPERF_ROWS
    assert job.tables["default"].embedding_dim == 128
    bags = [job.data.synthetic_multi_hot.get(f"cat_{index}", 1) for index in range(26)]
    assert bags == MLPERF_MULTI_HOT
    assert job.model == DLRMDCNConfig(
        dense_arch_layer_sizes=[512, 256, 128],
        over_arch_layer_sizes=[1024, 1024, 512, 256, 1],
        dcn_num_layers=3,
        dcn_low_rank_dim=512,
    )
    for optimizer in (job.optimizer.sparse, job.optimizer.dense):
        assert (optimizer.name, optimizer.lr, optimizer.eps, optimizer.weight_decay) == ("adagrad", 0.005, 1e-8, 0.0)
    for schedule in (job.schedule.sparse, job.schedule.dense):
        assert (schedule.kind, schedule.warmup_steps) == ("constant", 0)
    assert (job.trainer.global_batch_size, job.trainer.epochs) == (65536, 1)
    # 4,195,197,692 rows, evaluated 20 times.
    assert 4_195_197_692 // 65536 // job.trainer.evaluate_every_steps == 20


def test_criteo_kaggle_is_the_references_model() -> None:
    job = load_config(TrainJob, ["experiment=criteo_kaggle_dlrm"])
    assert _rows(job) == KAGGLE_ROWS
    assert job.tables["default"].embedding_dim == 16
    assert job.model == DLRMConfig(dense_arch_layer_sizes=[512, 256, 64, 16], over_arch_layer_sizes=[512, 256, 1])
    assert (job.optimizer.sparse.name, job.optimizer.sparse.lr) == ("sgd", 0.1)
    assert job.trainer.global_batch_size == 128


def test_criteo_1tb_tables_hold_every_id() -> None:
    assert _rows(load_config(TrainJob, ["data=criteo_1tb", "tables=criteo_1tb"])) == CRITEO_1TB_ROWS


@pytest.mark.parametrize(
    ("data", "rows"),
    [("criteo_kaggle_exact", KAGGLE_ROWS), ("criteo_1tb_exact", CRITEO_1TB_ROWS), ("criteo_1tb_mlperf", MLPERF_ROWS)],
)
def test_ids_are_capped_to_the_rows_of_the_references_tables(data: str, rows: list[int]) -> None:
    ids = load_config(PrepareJob, [f"data={data}", "source=x"]).data.feature_ids
    assert [ids[f"cat_{index}"].max_size for index in range(26)] == rows


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("exp=quickstart", "experiment"), ("trainer.max=3", "trainer.max_steps"), ("opt=sgd", "optimizer")],
)
def test_the_beginning_of_a_key_is_told_with_the_key(typed: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{meant}'"):
        load_config(TrainJob, ["data=quickstart", typed])


@pytest.mark.parametrize("count", [10, pytest.param(50, marks=pytest.mark.campaign)])
def test_every_typo_is_told_with_the_nearest_name_before_torch_is_imported(count: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.typos", "0", str(count)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "0"},
    )
    *typos, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(typos) == count
    untold = [typo for typo in typos if f"did you mean {typo['right']!r}" not in typo["told"]]
    assert not untold
    assert last == {"torch": False}


@pytest.mark.parametrize(
    ("name", "num_tables", "rows", "ids", "bottom"),
    [
        ("rmc1", 5, 100_000, 80, [8, 4, 1]),
        ("rmc2", 40, 2_000_000, 80, [8, 4, 1]),
        ("rmc3", 10, 800_000, 20, [80, 8, 4]),
    ],
)
def test_rmc_presets_have_the_proportions_of_the_paper(
    name: str, num_tables: int, rows: int, ids: int, bottom: list[int]
) -> None:
    job = load_config(TrainJob, [f"experiment={name}"])
    features = job.data.columns.sparse
    assert len(features) == num_tables and job.tables["cat_*"].num_embeddings == rows
    assert job.data.synthetic_multi_hot == dict.fromkeys(features, ids)
    assert isinstance(job.model, DLRMConfig)
    unit = job.tables["default"].embedding_dim
    assert unit == 32
    assert job.model.dense_arch_layer_sizes[:3] == [unit * times for times in bottom]
    assert job.model.dense_arch_layer_sizes[-1] == unit
    assert job.model.over_arch_layer_sizes == [4 * unit, 2 * unit, unit, 1]
