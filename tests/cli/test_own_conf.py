"""Options of a user's own folder compose with the package's, and a mistake in them names file and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.cli.command_line import load_config, split_flags
from pipeline.config.jobs.evaluate import EvaluateJob
from pipeline.config.jobs.train import TrainJob
from pipeline.runtime.errors import ConfigError
from tests.support.messages import names

QUICKSTART = "experiment=quickstart"
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def overlay(tmp_path: Path) -> Path:
    """A user's conf folder with a data set and an experiment."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "my_own_shop.yaml").write_text("name: my_own_shop\nformat: csv\n")
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "my_own_shop.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /data: my_own_shop\nname: my_own_shop\ntrainer:\n  global_batch_size: 64\n"
    )
    return tmp_path


def test_a_users_own_folder_adds_options(overlay: Path) -> None:
    job = load_config(TrainJob, ["experiment=my_own_shop", "--config-dir", str(overlay), "model=deepfm"])
    assert (job.data.format, job.trainer.global_batch_size, job.run_dir) == ("csv", 64, "runs/my_own_shop")
    assert load_config(TrainJob, [f"--config-dir={overlay}", QUICKSTART]).name == "quickstart"


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer:\n  globl_batch_size: 64\n", "experiment/my_own_shop globl_batch_size global_batch_size"),
        ("defaults:\n  - override /dta: my_own_shop\n", "'dta' 'data'"),
        ("defaults:\n  - override /data: my_own_shp\n", "data/my_own_shp 'my_own_shop'"),
        ("trainer:\n  seed: zero\n", "experiment/my_own_shop 'zero'"),
        ("defaults: [\n", "my_own_shop.yaml"),
    ],
)
def test_a_typo_in_a_users_file_names_file_and_key(overlay: Path, text: str, message: str) -> None:
    (overlay / "experiment" / "my_own_shop.yaml").write_text(f"# @package _global_\n{text}")
    with pytest.raises(ConfigError, match=names(message)):
        load_config(TrainJob, ["experiment=my_own_shop", f"--config-dir={overlay}"])


@pytest.mark.long
def test_an_experiment_takes_another_model_without_the_keys_that_this_one_lacks(overlay: Path) -> None:
    job = load_config(TrainJob, [QUICKSTART, "model=wide_deep"])
    assert (job.model.kind, job.name, job.trainer.global_batch_size) == ("wide_deep", "quickstart", 2048)
    assert load_config(TrainJob, [QUICKSTART, "model=dlrm_dcn"]).model.dense_arch_layer_sizes == [
        64,
        32,
        16,
    ]  # has them
    text = "# @package _global_\ndefaults:\n  - override /data: my_own_shop\nmodel:\n  over_arch_layer_sizes: [8, 1]\n"
    (overlay / "experiment" / "my_own_shop.yaml").write_text(text)
    words = ["experiment=my_own_shop", f"--config-dir={overlay}"]
    assert load_config(TrainJob, [*words, "model=fm"]).model.kind == "fm"
    assert load_config(TrainJob, words).model.over_arch_layer_sizes == [8, 1]


def test_what_newcomers_type_is_understood_or_told_the_cause(overlay: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (overlay / "experiment" / "my_own_shop.yaml").write_text("trainer:\n  seed: 1\n")
    with pytest.raises(ConfigError, match=names("# @package _global_")):
        load_config(TrainJob, ["experiment=my_own_shop", f"--config-dir={overlay}"])
    with pytest.raises(ConfigError, match=names("data=my_clicks --config-dir")):
        load_config(TrainJob, ["data=my_clicks"])
    for name in ("user id", "user_id:token", "цена", "a*b", "c(d)"):
        job = load_config(TrainJob, [QUICKSTART, f"tables.{name}.embedding_dim=16"])
        assert job.tables[name].embedding_dim == 16
    with pytest.raises(ConfigError, match=names("tables.user id.embeding_dim embedding_dim")):
        load_config(TrainJob, [QUICKSTART, "tables.user id.embeding_dim=16"])
    assert split_flags(["--cfg", "job", "a=1"]) == split_flags(["a=1", "--cfg"]) == (["a=1"], {"--cfg": ""})
    with pytest.raises(ConfigError, match=names("step=best which=best")):
        load_config(EvaluateJob, ["run=x", "step=best"])
    for flag in ("-m", "--multirun"):
        with pytest.raises(ConfigError, match=names(f"{flag} pipeline sweep")):
            split_flags([flag, "model=dlrm,dcn"])
    with pytest.raises(ConfigError, match=names("--cfg hydra")):
        split_flags(["--cfg", "hydra"])


def test_a_users_file_may_not_take_the_name_of_ours(overlay: Path) -> None:
    (overlay / "data" / "quickstart.yaml").write_text("name: mine\n")
    with pytest.raises(ConfigError, match=names("data/quickstart.yaml")):
        load_config(TrainJob, [QUICKSTART, f"--config-dir={overlay}"])
    with pytest.raises(ConfigError):
        load_config(TrainJob, [QUICKSTART, "--config-dir=/nowhere/at/all"])
