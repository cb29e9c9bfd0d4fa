"""A command line becomes a typed job, or one line that says what to write instead."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.cli import command_line
from pipeline.cli.command_line import load_config, print_user_errors, split_flags
from pipeline.cli.verb import Verb
from pipeline.config import saved_jobs
from pipeline.config.jobs.evaluate import EvaluateJob
from pipeline.config.jobs.prepare import GenerateJob, PrepareJob
from pipeline.config.jobs.retrain import RetrainJob
from pipeline.config.jobs.train import PlanJob, TrainJob
from pipeline.config.reader import ReaderConfig
from pipeline.config.saved_jobs import load_saved_job, save_job
from pipeline.data.dataset import FrequencyCurve, SparseFeature
from pipeline.embeddings.row_frequencies import merge_frequencies
from pipeline.models.deepfm import DeepFMConfig
from pipeline.models.dlrm import DLRMDCNConfig
from pipeline.runtime.errors import ConfigError, DataError
from pipeline.runtime.process.exit_codes import FAILED, USER_ERROR
from pipeline.training.preflight import validate_job
from tests.support.messages import mentions, names

QUICKSTART = "experiment=quickstart"
REPOSITORY = Path(__file__).resolve().parents[2]


def test_a_job_is_typed_all_the_way_down() -> None:
    job = load_config(TrainJob, [QUICKSTART, "model=dlrm_dcn", "data.reader.prefetch_batches=3"])
    assert isinstance(job, TrainJob) and isinstance(job.model, DLRMDCNConfig)
    assert job.data.reader == ReaderConfig(prefetch_batches=3)
    assert (job.name, job.run_dir, job.world_size) == ("quickstart", "runs/quickstart", 1)


def test_a_job_without_an_experiment_is_named_after_data_and_model() -> None:
    assert load_config(TrainJob, ["data=criteo_kaggle", "model=deepfm"]).run_dir == "runs/criteo_kaggle_deepfm"


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
            QUICKSTART, "tables.cat_3.embedding_dim=16", "tables.cat_3.init.kind=normal", "data.synthetic_multi_hot.cat_1=5",
            "tables.cat_3.sharding.sharding_types=[row_wise]", "data.feature_ids.cat_2.min_frequency=4",
        ],
    )  # fmt: skip
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
        (["trainer.seed"], "key=value"),
        (["trainer.seed=["], "trainer.seed=["),
        (["trainer.seed=1,2"], "key=[a,b]"),
        (["~trainer.seed"], "~trainer.seed"),
        (["run_dir=${nmae}"], "nmae"),
        (["--experiment=other"], "experiment=other"),
        (["--cgf"], "--cfg"),
        (["data=null"], "data=null"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_in_one_line_with_the_way_out(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=names(message)) as failure:
        load_config(TrainJob, [QUICKSTART, *overrides])
    assert "\n" not in str(failure.value)


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
        ("tables.cat_3.init.scale=0", "init.scale=0.0 0.0"),
        ("tables.default.init.scale=inf", "init.scale=inf"),
        ("comms.timeout_s=0.5", "comms.timeout_s=0.5"),
        ("comms.timeout_s=inf", "comms.timeout_s=inf"),
        ("data.split.test_fraction=nan", "split.test_fraction=nan"),
        ("name=", "name"),
        ("run_dir=", "run_dir"),
        ("data.path=' '", "data.path"),
        ("data.name=", "data.name"),
        ("run_dir=s3://bucket/run", "run_dir=s3://bucket/run"),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=names(message)):
        load_config(TrainJob, [QUICKSTART, override])


@pytest.mark.parametrize(
    "override",
    [
        "trainer.seed=9223372036854775807", "trainer.evaluate_batch_size=null", "trainer.evaluate_max_batches=1",
        "optimizer.dense.beta1=0", "optimizer.dense.momentum=0.999", "optimizer.sparse.eps=0", "schedule.dense.gamma=1",
        "tables.cat_3.init.scale=null", "comms.timeout_s=1", "trainer.early_stop.min_delta=0",
    ],
)  # fmt: skip
def test_a_value_at_the_end_of_its_range_is_taken(override: str) -> None:
    assert isinstance(load_config(TrainJob, [QUICKSTART, override]), TrainJob)


def test_a_plan_needs_no_local_run_folder() -> None:
    assert load_config(PlanJob, [QUICKSTART, "run_dir=s3://bucket/run"]).run_dir == "s3://bucket/run"


@pytest.mark.parametrize(
    ("job_type", "overrides", "message"),
    [
        (EvaluateJob, ["run=r1", "data.path=x"], "data_path"),
        (EvaluateJob, ["run=r1", "trainer.global_batch_size=8"], "global_batch_size trainer"),
        (
            EvaluateJob, ["run=r1", "trainer.precision=bf16"],
            "data_path global_batch_size max_batches other_data world_size trainer",
        ),
        (EvaluateJob, ["run=r1", "model=dlrm"], "data_path global_batch_size model"),
        (PrepareJob, ["data=quickstart", QUICKSTART], "memory_limit_gb experiment"),
        (TrainJob, ["expermient=quickstart"], "expermient experiment"),
        (PlanJob, [QUICKSTART, "hardware=h100"], "h100_80gb"),
        (PlanJob, [QUICKSTART, "hardware=h1000_80gb"], "h100_80gb"),
        (PlanJob, [QUICKSTART, "hardware="], "hardware"),
    ],
)  # fmt: skip
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


def test_a_saved_job_comes_back_equal_with_its_models_class(tmp_path: Path) -> None:
    job = load_config(
        TrainJob, ["data=quickstart", "model=deepfm", "tables.cat_1.init.scale=0.5", "trainer.max_steps=9"]
    )
    save_job(job, str(tmp_path / "command_line.yaml"))
    loaded = load_saved_job(TrainJob, str(tmp_path / "command_line.yaml"))
    assert loaded == job and type(loaded.model) is DeepFMConfig
    assert "!!" not in (tmp_path / "command_line.yaml").read_text()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("global_batch_size: 2048", "global_batch: 2048", "global_batch_size"),
        ("kind: dlrm", "kind: transformer", "model.kind='transformer' dlrm"),
        ("seed: 0", "seed: zero", "zero"),
        ("seed: 0", "seed: !!python/object/apply:os.getcwd []", "os.getcwd"),
    ],
)
def test_a_damaged_saved_job_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "command_line.yaml"
    save_job(load_config(TrainJob, [QUICKSTART, "trainer.global_batch_size=2048"]), str(path))
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ConfigError, match=names(message)):
        load_saved_job(TrainJob, str(path))


def test_a_folder_without_a_saved_job_is_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        load_saved_job(TrainJob, str(tmp_path / "command_line.yaml"))


@pytest.fixture
def overlay(tmp_path: Path) -> Path:
    """A user's conf folder with a data set and an experiment."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "shop.yaml").write_text("name: shop\nformat: csv\n")
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "shop.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /data: shop\nname: shop\ntrainer:\n  global_batch_size: 64\n"
    )
    return tmp_path


def test_a_users_own_folder_adds_options(overlay: Path) -> None:
    job = load_config(TrainJob, ["experiment=shop", "--config-dir", str(overlay), "model=deepfm"])
    assert (job.data.format, job.trainer.global_batch_size, job.run_dir) == ("csv", 64, "runs/shop")
    assert load_config(TrainJob, [f"--config-dir={overlay}", QUICKSTART]).name == "quickstart"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer:\n  globl_batch_size: 64\n", "experiment/shop globl_batch_size global_batch_size"),
        ("defaults:\n  - override /dta: shop\n", "'dta' 'data'"),
        ("defaults:\n  - override /data: shp\n", "data/shp 'shop'"),
        ("trainer:\n  seed: zero\n", "experiment/shop 'zero'"),
        ("defaults: [\n", "shop.yaml"),
    ],
)  # fmt: skip
def test_a_typo_in_a_users_file_names_file_and_key(overlay: Path, text: str, message: str) -> None:
    (overlay / "experiment" / "shop.yaml").write_text(f"# @package _global_\n{text}")
    with pytest.raises(ConfigError, match=names(message)):
        load_config(TrainJob, ["experiment=shop", f"--config-dir={overlay}"])


def test_an_experiment_takes_another_model_without_the_keys_that_this_one_lacks(overlay: Path) -> None:
    job = load_config(TrainJob, [QUICKSTART, "model=wide_deep"])
    assert (job.model.kind, job.name, job.trainer.global_batch_size) == ("wide_deep", "quickstart", 2048)
    assert load_config(TrainJob, [QUICKSTART, "model=dlrm_dcn"]).model.dense_arch_layer_sizes == [
        64,
        32,
        16,
    ]  # has them
    text = "# @package _global_\ndefaults:\n  - override /data: shop\nmodel:\n  over_arch_layer_sizes: [8, 1]\n"
    (overlay / "experiment" / "shop.yaml").write_text(text)
    words = ["experiment=shop", f"--config-dir={overlay}"]
    assert load_config(TrainJob, [*words, "model=fm"]).model.kind == "fm"
    assert load_config(TrainJob, words).model.over_arch_layer_sizes == [8, 1]


def test_what_newcomers_type_is_understood_or_told_the_cause(overlay: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (overlay / "experiment" / "shop.yaml").write_text("trainer:\n  seed: 1\n")
    with pytest.raises(ConfigError, match=names("# @package _global_")):
        load_config(TrainJob, ["experiment=shop", f"--config-dir={overlay}"])
    with pytest.raises(ConfigError, match=names("data=my_clicks --config-dir")):
        load_config(TrainJob, ["data=my_clicks"])
    with pytest.raises(ConfigError, match=names("'tables={user id: {embedding_dim: 16}}'")):
        load_config(TrainJob, [QUICKSTART, "tables.user id.embedding_dim=16"])
    assert split_flags(["--cfg", "job", "a=1"]) == split_flags(["a=1", "--cfg"]) == (["a=1"], {"--cfg": ""})
    with pytest.raises(ConfigError, match=names("step=best which=best")):
        load_config(EvaluateJob, ["run=x", "step=best"])
    with pytest.raises(ConfigError, match=names("--cfg hydra")):
        split_flags(["--cfg", "hydra"])


def test_a_users_file_may_not_take_the_name_of_ours(overlay: Path) -> None:
    (overlay / "data" / "quickstart.yaml").write_text("name: mine\n")
    with pytest.raises(ConfigError, match=names("data/quickstart.yaml")):
        load_config(TrainJob, [QUICKSTART, f"--config-dir={overlay}"])
    with pytest.raises(ConfigError):
        load_config(TrainJob, [QUICKSTART, "--config-dir=/nowhere/at/all"])


def _run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *argv: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["train", *argv])
    with pytest.raises(SystemExit) as stop:
        command_line.parse_command_line(
            TrainJob,
            "Train one model:  python -m pipeline.train experiment=quickstart",
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
    assert "model=        autoint bst dcn dcnv2 deepfm din dlrm*" in out
    assert "quickstart_deepfm" in out and "global_batch_size" in out and "--config-dir DIR" in out


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
    assert code == 2 and "python -m pipeline.prepare data=quickstart" in err


def test_only_rank_0_says_the_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert _run(capsys, monkeypatch, "experiment=quickstrat") == (2, "", "")


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


def test_a_wrong_command_fails_in_every_verb_before_torch_is_imported() -> None:
    """One process for all verbs: sys.modules would show what any of them imported."""
    code = (
        "import runpy, sys\n"
        "for verb in ('generate', 'prepare', 'plan', 'train', 'evaluate'):\n"
        "    sys.argv = [verb, 'nothing.like.this=1']\n"
        "    try:\n"
        "        runpy.run_module(f'pipeline.{verb}', run_name='__main__')\n"
        "    except SystemExit as stop:\n"
        "        assert stop.code == 2, stop.code\n"
        "    else:\n"
        "        raise AssertionError(verb)\n"
        "heavy = {'torch', 'torchrec', 'pyarrow', 'duckdb', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("error: unknown key 'nothing'") == 5


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
