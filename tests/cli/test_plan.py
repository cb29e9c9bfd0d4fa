from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from pipeline.cli.command_line import load_config
from pipeline.cli.plan import describe, main, plan, train_command
from pipeline.config.columns import ColumnsConfig
from pipeline.config.data import DataConfig, IdsConfig
from pipeline.config.jobs.train import PlanJob, TrainJob
from pipeline.config.planner import PlannerConfig
from pipeline.config.tables import TableConfig
from pipeline.config.training import TrainerConfig
from pipeline.models.dlrm import DLRMConfig
from pipeline.planner.plan_codec import read_plan
from pipeline.runtime.errors import ConfigError, DataError, PlanError, TrainingError
from pipeline.training.plan_job import PlanSummary, check, diff, show
from pipeline.training.preflight import validate_job
from tests.planner.problems import KAGGLE_ROWS, preset
from tests.support.datasets import described_dataset
from tests.support.messages import mentions, names


def _job(folder: Path) -> PlanJob:
    """Criteo Kaggle's shape for 16 ranks of absent hardware, from dataset.json alone."""
    dataset = described_dataset(
        {f"cat_{index}": rows for index, rows in enumerate(KAGGLE_ROWS)}, num_dense=13, num_rows=100_000
    )
    (folder / "data").mkdir()
    (folder / "data" / "dataset.json").write_text(dataset.to_json())
    return PlanJob(
        name="kaggle",
        world_size=16,
        data=DataConfig(name="kaggle", path=str(folder / "data")),
        model=DLRMConfig(),
        planner=PlannerConfig(kind="torchrec", plan_file=str(folder / "plan.json")),
        hardware=preset("h100_80gb"),
        trainer=TrainerConfig(global_batch_size=65536),
    )


@pytest.fixture
def job(tmp_path: Path) -> PlanJob:
    return _job(tmp_path)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> PlanSummary:
    """What planning the job came to: planning costs seconds. Copy its file before changing it."""
    return plan(_job(tmp_path_factory.mktemp("planned")))


@pytest.fixture(scope="module")
def plan_files(planned: PlanSummary, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two plans of one job, for 16 and for 8 ranks."""
    job = _job(tmp_path_factory.mktemp("other"))
    job.world_size = 8
    return planned.plan_file, plan(job).plan_file


def _run(words: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["plan", *words])
        main()


def test_the_step_is_predicted_beside_the_plan_and_drawn_on_its_page(planned: PlanSummary) -> None:
    assert mentions(planned.forecast, "samples/s 16 rank(s) 4,096 data sheet h100_80gb 75 % epoch 100,000")
    assert planned.page is not None
    page = Path(planned.page).read_text()
    assert "The step, predicted" in page and "timeline of one step" in page


@pytest.mark.long
def test_hardware_that_does_not_say_its_peak_is_planned_for_without_a_prediction(job: PlanJob) -> None:
    job = replace(job, brief=True, hardware=replace(job.hardware, tflops_fp32=None))
    assert mentions(plan(job).forecast, "not predicted tflops_fp32 planner.predict_step=false")


def test_a_laptop_plans_for_absent_gpus(planned: PlanSummary) -> None:
    record = read_plan(planned.plan_file)
    assert (planned.world_size, planned.ranks_per_host, len(record.ranks)) == (16, 8, 16)
    assert list(record.plan.plan) == ["model.sparse_arch.embedding_bag_collection"]  # as in training
    assert [choice.num_embeddings for choice in record.tables] == KAGGLE_ROWS
    assert record.fingerprint["batch_size"] == 4096
    assert record.usable_hbm_bytes < 0.85 * 79 * 2**30  # the dense part has its share
    text = describe(planned)
    assert all(f"cat_{index} " in text for index in range(26))
    assert mentions(text, f"{planned.plan_file} 16 h100_80gb")
    page = planned.plan_file.replace(".json", ".html")
    assert mentions(text, f"{page}") and mentions(Path(page).read_text(), "16 h100_80gb</title>")


def test_planning_from_the_file_shows_it_again_and_refuses_another_job(job: PlanJob, planned: PlanSummary) -> None:
    job.planner = PlannerConfig(kind="file", plan_file=planned.plan_file)
    again = plan(job)
    assert (again.explanation, again.page) == (planned.explanation, None)
    assert planned.explanation in show(planned.plan_file)
    job.trainer.global_batch_size = 32768
    with pytest.raises(PlanError, match=names("batch_size 4096 2048")):
        plan(job)


def test_a_batch_that_does_not_divide_is_refused(job: PlanJob) -> None:
    job.trainer.global_batch_size = 1000
    with pytest.raises(ConfigError, match="1000"):
        plan(job)


def test_a_plan_that_cannot_be_written_ends_before_the_search(
    job: PlanJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").write_text("")
    job.planner.plan_file = str(tmp_path / "taken" / "plan.json")
    monkeypatch.setattr("pipeline.planner.planner.make_plan", lambda *_: pytest.fail("searched"))
    with pytest.raises(OSError, match=r"plan\.json"):
        plan(job)
    assert main.verb.written_to(job) == job.planner.plan_file


def test_the_next_command_trains_with_the_plan(planned: PlanSummary) -> None:
    overrides = ["experiment=kaggle", "hardware=h100_80gb", "world_size=16", "planner=torchrec", "run_dir=a b"]
    assert train_command(planned, overrides) == (
        "torchx run -s <scheduler> pipeline.train -j 2x8 -- "
        "experiment=kaggle hardware=h100_80gb world_size=16 'run_dir=a b' planner=file"
    )
    host = replace(planned, world_size=8)
    assert train_command(host, []) == "torchx run -s local_cwd pipeline.train -j 1x8 -- planner=file"
    rack = replace(planned, world_size=72, ranks_per_host=4)
    assert "-j 18x4 --" in train_command(rack, [])
    one = replace(planned, world_size=1, ranks_per_host=1)
    assert train_command(one, ["experiment=kaggle"]) == "python -m pipeline train experiment=kaggle planner=file"


def test_the_next_command_has_no_key_that_training_does_not_know() -> None:
    summary = PlanSummary("plan.json", None, "search", "cpu", 1, 1, 1.0, 1.0, 1.0, "", "")
    own = {field.name for field in fields(PlanJob)} - {field.name for field in fields(TrainJob)}
    overrides = [f"{key}=1" if key != "target" else "target.epochs_per_day=1" for key in sorted(own)]
    assert overrides and not own & {word.split("=")[0] for word in train_command(summary, overrides).split()}


@pytest.mark.long
def test_a_plan_is_made_without_the_data_where_tables_say_their_rows(
    job: PlanJob, planned: PlanSummary, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(job.data.path)
    job.tables = {f"cat_{index}": TableConfig(num_embeddings=rows) for index, rows in enumerate(KAGGLE_ROWS)}
    with caplog.at_level(logging.INFO, logger="pipeline"):
        plan(job)
    assert mentions(caplog.text, f"{job.data.path} 26 26")
    assert read_plan(job.planner.plan_file) == read_plan(planned.plan_file)
    train = TrainJob(**{field.name: getattr(job, field.name) for field in fields(TrainJob)})
    with pytest.raises(TrainingError, match=names("dataset.json")):
        validate_job(train, 16)


def test_the_config_alone_gives_the_tables_that_prepared_data_give(prepared_clicks: str, tmp_path: Path) -> None:
    """So a plan that was made without the data is not refused with them."""
    words = ["experiment=quickstart", "data.synthetic_multi_hot={cat_3: 5}"]
    prepared = load_config(PlanJob, [*words, f"data.path={prepared_clicks}"])
    tables = validate_job(prepared, 2)
    rows = [f"tables.{table.name}.num_embeddings={table.num_embeddings}" for table in tables]
    absent = load_config(PlanJob, [*words, *rows, f"data.path={tmp_path / 'absent'}"])
    assert validate_job(absent, 2) == [replace(table, frequencies=None) for table in tables]
    assert all(table.frequencies for table in tables if table.num_embeddings > 1)


SHIPPED = [
    line.split()[4:]
    for line in (Path(__file__).resolve().parents[2] / "sharding_plans" / "README.md").read_text().splitlines()
    if line.startswith("python -m pipeline plan ")
]


@pytest.mark.long
@pytest.mark.parametrize("words", SHIPPED, ids=" ".join)
def test_every_shipped_plan_holds_for_the_command_that_made_it(words: list[str]) -> None:
    job = load_config(PlanJob, words)
    assert check(job.planner.plan_file, job) == []
    job.trainer.global_batch_size *= 2
    assert check(job.planner.plan_file, job) != []


def test_without_the_data_what_only_the_data_can_tell_is_asked_for(job: PlanJob) -> None:
    shutil.rmtree(job.data.path)
    with pytest.raises(DataError, match=names("cat_0 25")) as caught:
        plan(job)
    assert mentions(str(caught.value), "pipeline prepare data=kaggle")
    job.data.ids = IdsConfig(kind="hash", hash_size=1000)
    assert {table.num_embeddings for table in validate_job(job, 16)} == {1000}
    job.data = DataConfig("mine", job.data.path, "csv", ColumnsConfig(sparse=["a"], multi_hot=["words"]))
    with pytest.raises(DataError, match=names("words")):
        plan(job)


@pytest.mark.long
def test_a_plan_is_checked_against_a_job(job: PlanJob) -> None:
    job.hardware = preset("h100_80gb", hbm_cap_gb=4.0)
    plan(job)
    path = job.planner.plan_file
    assert check(path, job) == []
    job.hardware = preset("h100_80gb", hbm_cap_gb=5.0)
    assert check(path, job) == [f"topology.hbm_cap_bytes: {4 * 2**30} in the plan, {5 * 2**30} in this job"]
    job.hardware = preset("h100_80gb", hbm_cap_gb=4.0)
    job.planner.reserved_memory_fraction = 0.6
    (line, *_) = check(path, job)
    assert line.startswith("it puts ") and "GiB left without the dense part" in line


@pytest.mark.long
def test_plan_files_are_shown_and_compared_without_torch(
    plan_files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    _run(["show", plan_files[0]])
    shown = capsys.readouterr().out
    assert mentions(shown, "26 16 h100_80gb 4096") and shown == show(plan_files[0]) + "\n"
    _run(["diff", *plan_files])
    moved = capsys.readouterr().out
    assert "topology.world_size: 16" in moved and moved == diff(*plan_files) + "\n"
    code = (
        "import sys\nfrom pipeline.cli.plan import main\n"
        f"for words in (['show', {plan_files[0]!r}], ['diff', *{plan_files!r}]):\n    sys.argv = ['plan', *words]\n    main()\n"
        "assert not {'torch', 'torchrec', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", shown + moved)


def test_check_exits_with_0_or_1(plan_files: tuple[str, str], job: PlanJob, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "data=criteo_kaggle",
        "name=kaggle",
        f"data.path={job.data.path}",
        "tables.default.embedding_dim=64",
        "trainer.global_batch_size=65536",
        "hardware=h100_80gb",
        "world_size=8",
    ]
    _run(["check", plan_files[1], *words])
    assert capsys.readouterr().out == f"{plan_files[1]} holds for this job\n"
    with pytest.raises(SystemExit) as ended:
        _run(["check", plan_files[0], *words])
    told = capsys.readouterr().out
    assert ended.value.code == 1
    assert told.splitlines()[0] == f"{plan_files[0]} does not hold for this job:"
    assert mentions(told.splitlines(), "topology.world_size 16")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["shwo", "a.json"], "shwo show"),
        (["show"], "FILE"),
        (["diff", "a.json"], "diff A B"),
        (["show", "a.json", "b.json"], "b.json FILE"),
        (["check", "experiment=quickstart"], "FILE"),
        (["show", "/absent/a.json"], "/absent/a.json pipeline plan"),
        (["check", "/absent/a.json", "data=criteo_kaggle"], "/absent/a.json"),
        (["check", "a.json", "hardware=h100"], "hardware=h100 a100_40gb"),
        (["hardwear=h200"], "hardware"),
    ],
)
def test_a_wrong_command_is_one_line_and_exit_code_2(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as caught:
        _run(words)
    told = capsys.readouterr().err
    assert caught.value.code == 2 and mentions(told, error) and len(told.splitlines()) == 1


def test_damaged_plan_files_are_one_line_too(
    planned: PlanSummary, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads(Path(planned.plan_file).read_text())
    path = tmp_path / "damaged.json"
    for damaged, error in (
        (b"\x80binary", "plan file"),
        (b"[]", "plan file"),
        (json.dumps({**content, "format_version": 9}).encode(), "format_version"),
        (json.dumps({**content, "ranks": [{"rank": 0}]}).encode(), "plan file"),
        (json.dumps({**content, "plan": {}}).encode(), "plan tables"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(SystemExit) as caught:
            _run(["show", str(path)])
        told = capsys.readouterr().err
        assert caught.value.code == 2 and mentions(told, error) and len(told.splitlines()) == 1


@pytest.mark.parametrize("words", [["show", "--help"], ["diff", "-h"], ["check", "--help"]])
def test_help_names_the_commands(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        _run(words)
    told = capsys.readouterr().out
    assert ended.value.code == 0 and all(
        mentions(told, f"pipeline plan {command}") for command in ("show", "diff", "check")
    )
