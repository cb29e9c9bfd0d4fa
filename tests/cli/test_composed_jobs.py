"""Words of the command line and the YAML of conf/ become one typed job, or an error that names the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.cli.command_line import explain_key, load_config
from pipeline.config.data import ReaderConfig
from pipeline.config.jobs.evaluate import EvaluateJob
from pipeline.config.jobs.prepare import GenerateJob, PrepareJob
from pipeline.config.jobs.retrain import RetrainJob
from pipeline.config.jobs.train import PlanJob, TrainJob
from pipeline.config.saved_jobs import job_to_yaml
from pipeline.models.dlrm import DLRMDCNConfig
from pipeline.runtime.errors import ConfigError
from tests.support.messages import names

QUICKSTART = "experiment=quickstart"
REPOSITORY = Path(__file__).resolve().parents[2]


def test_a_job_is_typed_all_the_way_down() -> None:
    job = load_config(TrainJob, [QUICKSTART, "model=dlrm_dcn", "data.reader.prefetch_batches=3"])
    assert isinstance(job, TrainJob) and isinstance(job.model, DLRMDCNConfig)
    assert job.data.reader == ReaderConfig(prefetch_batches=3)
    assert (job.name, job.run_dir, job.world_size) == ("quickstart", "runs/quickstart", 1)


def test_a_verb_of_a_run_names_a_data_set_as_train_does() -> None:
    assert load_config(EvaluateJob, ["run=r1", "data.path=x"]).data_path == "x"
    assert explain_key("data.path", EvaluateJob).startswith("data_path = null")
    assert load_config(TrainJob, [QUICKSTART, "run_dir=a", "run_dir=a"]).run_dir == "a"  # as a project's Makefile may


def test_a_job_without_an_experiment_is_named_after_data_and_model() -> None:
    assert load_config(TrainJob, ["data=criteo_kaggle", "model=deepfm"]).run_dir == "runs/criteo_kaggle_deepfm"


@pytest.mark.long
def test_names_of_a_mapping_may_look_like_numbers_and_truths(tmp_path: Path) -> None:
    words = ["data.name=x", "data.format=csv", "data.columns.label=y", "data.columns.sparse=[a]", "source=x"]
    for given, names_of in (("{TRUE: 1, False: 0}", ["TRUE", "False"]), ("{1: 0, -1: 1}", ["1", "-1"])):
        values = load_config(PrepareJob, [*words, f"data.columns.label_values={given}"]).data.columns.label_values
        assert list(values) == names_of
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "own.yaml").write_text("columns: {label: y, label_values: {true: 1, false: 0}}\n")
    with pytest.raises(ConfigError, match=names("data/own quotes 'true'")):
        load_config(PrepareJob, ["--config-dir", str(tmp_path), "data=own", "source=x"])


def test_every_experiment_also_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    job = load_config(PlanJob, [QUICKSTART, "world_size=16", "hardware=h100_80gb"])
    assert type(job) is PlanJob
    assert job.planner.plan_file == "sharding_plans/quickstart.h100_80gbx16.json"


def test_world_size_is_torchruns_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert load_config(TrainJob, [QUICKSTART]).world_size == 4
    assert load_config(TrainJob, [QUICKSTART, "world_size=2"]).world_size == 2


def test_a_table_that_the_config_does_not_list_is_set_without_a_plus() -> None:
    job = load_config(
        TrainJob,
        [
            QUICKSTART,
            "tables.cat_3.embedding_dim=16",
            "tables.cat_3.init.kind=normal",
            "data.synthetic_multi_hot.cat_1=5",
            "tables.cat_3.sharding.sharding_types=[row_wise]",
            "data.feature_ids.cat_2.min_frequency=4",
        ],
    )
    table = job.tables["cat_3"]
    assert table.embedding_dim == 16
    assert table.init is not None and table.init.kind == "normal"
    assert table.sharding is not None and table.sharding.sharding_types == ["row_wise"]
    assert job.data.synthetic_multi_hot == {"cat_1": 5}
    assert job.data.feature_ids["cat_2"].min_frequency == 4


def test_tables_can_be_given_as_one_mapping() -> None:
    job = load_config(TrainJob, [QUICKSTART, "tables={cat_1: {embedding_dim: 8}, cat_2: {pooling: mean}}"])
    assert (job.tables["cat_1"].embedding_dim, job.tables["cat_2"].pooling) == (8, "mean")


def test_an_optional_section_comes_to_be_when_a_field_of_it_is_set() -> None:
    job = load_config(GenerateJob, ["data=criteo_kaggle", "data.synthetic.num_rows=7"])
    assert job.data.synthetic is not None and job.data.synthetic.num_rows == 7


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.globl_batch_size=3"], "trainer.globl_batch_size trainer.global_batch_size"),
        (["+trainer.globl_batch_size=3"], "trainer.global_batch_size"),
        (["++trainer.globl_batch_size=3"], "trainer.global_batch_size"),
        (["lr=0.1"], "optimizer.sparse.lr optimizer.dense.lr"),
        (["tables.cat_3.embeding_dim=16"], "tables.cat_3.embedding_dim"),
        (["tables={cat_3: {embeding_dim: 16}}"], "embedding_dim"),
        (["trainer.seed.deeper=1"], "trainer.seed"),
        (["modle=dlrm"], "modle model"),
        (["model=dlrm_dnc"], "model=dlrm_dnc dlrm_dcn logistic_regression matrix_factorization two_tower wide_deep"),
        (["model.dcn_num_layers=2"], "model.dcn_num_layers"),
        (["model.kind=deepfm"], "model.kind='deepfm' DLRMConfig"),
        (["trainer.global_batch_size=many"], "many str"),
        (["trainer.max_steps=1e3"], "1e3"),
        (["trainer=3"], "trainer=3 default"),
        (["trainer.global_batch_size=0"], "trainer.global_batch_size=0"),
        (["comms.forward_precision=bf61"], "bf16 fp16 fp32 int8"),
        (["trainer.seed"], "key=value trainer.seed=<value>"),
        (["quickstart_deepfm"], "key=value experiment=quickstart_deepfm"),
        (["~trainer"], "~trainer default"),
        (["tables[cat_1]=3"], "tables[cat_1]=3 names and dots"),
        (['tables={"cat_1": {embedding_dim: 8}}'], "no quotes"),
        (["name='x"], "name='x quote"),
        (["trainer.seed=["], "trainer.seed=[ not closed"),
        (["trainer.seed=1,2"], "key=[a,b]"),
        (["~trainer.seed"], "~trainer.seed"),
        (["run_dir=${nmae}"], "nmae"),
        (["--experiment=other"], "experiment=other"),
        (["--cgf"], "--cfg"),
        (["data=null"], "data=null"),
    ],
)
def test_what_cannot_be_is_said_in_one_line_with_the_way_out(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=names(message)) as failure:
        load_config(TrainJob, [QUICKSTART, *overrides])
    assert "\n" not in str(failure.value) and "expecting" not in str(failure.value), "a parser's words"


@pytest.mark.parametrize(
    "text",
    [
        "a=b",
        "50%",
        "(x)",
        "ü",
        "a&b",
        "!",
        "<x>",
        ";",
        ",",
        "~/x",
        "a b",
        "dt={2026-11-01..2026-11-07}/part-{1..8}.csv",
    ],
)
def test_text_need_not_be_quoted_for_signs_that_a_parser_knows(text: str) -> None:
    job = load_config(TrainJob, [QUICKSTART, f"name={text}"])
    assert job.name == text
    assert f"name: '{text}'\n" in job_to_yaml(job) or f"name: {text}\n" in job_to_yaml(job)


def test_an_entry_of_a_list_may_have_an_equals_sign() -> None:
    """docs/do/retraining.md has `retry=[dt=2026-11-20]`, which Hydra does not read."""
    job = load_config(RetrainJob, [QUICKSTART, "source=clicks", "retry=[dt=2026-11-20, dt=2026-11-21/hour=03,last]"])
    assert job.retry == ["dt=2026-11-20", "dt=2026-11-21/hour=03", "last"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.evaluate_batch_size=0", "trainer.evaluate_batch_size=0"),
        ("trainer.evaluate_max_batches=0", "trainer.evaluate_max_batches=0"),
        ("trainer.seed=-1", "trainer.seed=-1 [0 9223372036854775807]"),
        ("trainer.seed=9223372036854775808", "trainer.seed=9223372036854775808"),
        (f"trainer.seed=1{400 * '0'}", "trainer.seed"),
        ("trainer.early_stop.min_delta=-0.1", "trainer.early_stop.min_delta=-0.1 0.0"),
        ("trainer.early_stop.min_delta=nan", "trainer.early_stop.min_delta=nan"),
        ("trainer.gradient_clip_norm=inf", "trainer.gradient_clip_norm=inf"),
        ("optimizer.sparse.lr=nan", "optimizer.sparse.lr=nan"),
        ("optimizer.dense.lr=inf", "optimizer.dense.lr=inf"),
        ("optimizer.dense.lr=1e400", "optimizer.dense.lr=inf"),
        ("optimizer.sparse.lr=0", "optimizer.sparse.lr=0.0 0.0"),
        ("optimizer.sparse.beta1=1", "optimizer.sparse.beta1=1.0"),
        ("optimizer.dense.beta2=-0.1", "optimizer.dense.beta2=-0.1"),
        ("optimizer.dense.beta2=nan", "optimizer.dense.beta2=nan"),
        ("optimizer.dense.momentum=1.5", "optimizer.dense.momentum=1.5"),
        ("optimizer.sparse.momentum=-1", "optimizer.sparse.momentum=-1.0"),
        ("optimizer.sparse.eps=-1e-8", "optimizer.sparse.eps=-1e-08 0.0"),
        ("optimizer.dense.weight_decay=inf", "optimizer.dense.weight_decay=inf"),
        ("schedule.sparse.power=0", "schedule.power=0.0 0.0"),
        ("schedule.dense.gamma=0", "schedule.gamma=0.0 0.0"),
        ("schedule.dense.gamma=1.1", "schedule.gamma=1.1 [0.0 1.0]"),
        ("schedule.dense.end_factor=nan", "schedule.end_factor=nan"),
        ("tables.cat_3.init.scale=0", "tables.cat_3: init.scale=0.0 0.0"),
        ("tables.default.init.scale=inf", "init.scale=inf"),
        ("data.columns.labels.click.weight=0", "data.columns.labels.click: labels.weight=0.0 0.0"),
        ("data.feature_ids.cat_3.min_frequency=0", "data.feature_ids.cat_3: ids.min_frequency=0 1"),
        ("comms.timeout_s=0.5", "comms.timeout_s=0.5"),
        ("comms.timeout_s=inf", "comms.timeout_s=inf"),
        ("data.split.test_fraction=nan", "split.test_fraction=nan"),
        ("name=", "name"),
        ("run_dir=", "run_dir"),
        ("data.path=' '", "data.path"),
        ("data.name=", "data.name"),
        ("run_dir=s3://bucket/run", "run_dir=s3://bucket/run"),
    ],
)
def test_a_value_out_of_range_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=names(message)):
        load_config(TrainJob, [QUICKSTART, override])


@pytest.mark.parametrize(
    "override",
    [
        "trainer.seed=9223372036854775807",
        "trainer.evaluate_batch_size=null",
        "trainer.evaluate_max_batches=1",
        "optimizer.dense.beta1=0",
        "optimizer.dense.momentum=0.999",
        "optimizer.sparse.eps=0",
        "schedule.dense.gamma=1",
        "tables.cat_3.init.scale=null",
        "comms.timeout_s=1",
        "trainer.early_stop.min_delta=0",
    ],
)
def test_a_value_at_the_end_of_its_range_is_taken(override: str) -> None:
    assert isinstance(load_config(TrainJob, [QUICKSTART, override]), TrainJob)


def test_a_plan_needs_no_local_run_folder() -> None:
    assert load_config(PlanJob, [QUICKSTART, "run_dir=s3://bucket/run"]).run_dir == "s3://bucket/run"


@pytest.mark.parametrize(
    ("job_type", "overrides", "message"),
    [
        (EvaluateJob, ["run=r1", "trainer.global_batch_size=8"], "global_batch_size trainer"),
        (
            EvaluateJob,
            ["run=r1", "trainer.precision=bf16"],
            "data_path global_batch_size max_batches other_data world_size trainer",
        ),
        (EvaluateJob, ["run=r1", "model=dlrm"], "data_path global_batch_size model"),
        (PrepareJob, ["data=quickstart", QUICKSTART], "memory_limit_gb experiment"),
        (TrainJob, ["expermient=quickstart"], "expermient experiment"),
        (PlanJob, [QUICKSTART, "hardware=h100"], "h100_80gb"),
        (PlanJob, [QUICKSTART, "hardware=h1000_80gb"], "h100_80gb"),
        (PlanJob, [QUICKSTART, "hardware="], "hardware"),
    ],
)
def test_a_hint_names_what_the_verb_has(job_type: type, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=names(message)):
        load_config(job_type, overrides)


@pytest.mark.parametrize(
    ("job_type", "message"),
    [
        (TrainJob, "experiment=<option> data=<option>"),
        (PrepareJob, "data=<option>"),
        (EvaluateJob, "run=<value>"),
    ],
)
def test_what_must_be_given_is_asked_for(job_type: type, message: str) -> None:
    with pytest.raises(ConfigError, match=names(message)):
        load_config(job_type, [])


@pytest.mark.long
def test_a_retriever_has_no_gate_to_be_retrained_by() -> None:
    with pytest.raises(ConfigError, match=names("model=two_tower recall_at_10")):
        load_config(RetrainJob, ["experiment=user_item_two_tower", "source=x"])


def test_a_metric_without_a_label_is_that_of_the_first_label_that_has_it() -> None:
    job = load_config(TrainJob, ["experiment=conversions_mmoe", "early_stop=auc"])
    assert (job.early_stop_metric, job.plateau_metric, job.best_metric) == ("click/auc", "click/auc", "click/auc")
    named = load_config(
        TrainJob, ["experiment=conversions_mmoe", "early_stop=auc", "checkpoint.best_metric=conversion/auc"]
    )
    assert (named.early_stop_metric, named.best_metric) == ("click/auc", "conversion/auc")
    assert load_config(TrainJob, ["experiment=quickstart", "early_stop=auc"]).best_metric == "auc"


def test_a_chosen_option_whose_values_the_experiment_replaces_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """It was silent: with optimizer=adam an experiment trained with its own Adagrad."""
    job = load_config(TrainJob, ["experiment=conversions_esmm", "optimizer=adam"])
    assert job.optimizer.sparse.name == "adagrad"
    (line,) = [record.getMessage() for record in caplog.records]
    assert "optimizer=adam: the experiment sets optimizer.sparse.name=adagrad" in line
    caplog.clear()
    fix = line.partition(" add ")[2].split()
    job = load_config(TrainJob, ["experiment=conversions_esmm", "optimizer=adam", *fix])
    assert job.optimizer.sparse.name == "adam" and not caplog.records
    load_config(TrainJob, [QUICKSTART, "optimizer.sparse.name=adam"])
    assert not caplog.records
