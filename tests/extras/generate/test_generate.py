"""Generators of the extra: rows follow the planted teacher, equal settings give equal bytes, old keys are named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipeline.cli.command_line import load_config
from pipeline.cli.generate import generate
from pipeline.config.jobs.prepare import GenerateJob
from pipeline.config.jobs.train import TrainJob
from pipeline.config.registry import components
from pipeline.config.saved_jobs import job_from_yaml, job_to_yaml
from pipeline.data.generate.synthetic import TEACHER_SUFFIX
from pipeline.extras.generate import user_item
from pipeline.extras.generate.kinds import HistoriesConfig, UserItemConfig
from pipeline.runtime.errors import ConfigError
from tests.support.messages import names


def test_clicks_of_users_on_items_follow_their_planted_probabilities(tmp_path: Path) -> None:
    config = UserItemConfig(num_rows=6_000, num_users=50, num_items=40)
    for name in ("one", "other"):
        user_item.write_source(config, f"{tmp_path}/{name}", threads=2)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
    header, *rows = (tmp_path / "one").read_text().splitlines()
    assert header.split("\t") == ["click", "user_id", "user_group", "item_id", "item_genre"]
    cells = np.array([row.split("\t") for row in rows], dtype=np.int64)
    truth = pq.read_table(f"{tmp_path}/one{TEACHER_SUFFIX}")[0].to_numpy()
    assert len(cells) == len(truth) == 6_000
    assert cells[:, 0].mean() == pytest.approx(truth.mean(), abs=0.03)
    assert truth.mean() == pytest.approx(config.positive_rate, abs=0.03)
    assert cells[:, 1].max() < 50 and cells[:, 3].max() < 40
    assert len(set(zip(cells[:, 1], cells[:, 2], strict=True))) <= 50  # a user has one group


@pytest.mark.parametrize("kind", components("generator"))
def test_a_data_set_of_each_generator_is_written_with_its_true_probabilities(kind: str, tmp_path: Path) -> None:
    words = [f"data={kind}", "data.generator.num_rows=500", f"output={tmp_path}/rows.tsv"]
    summary = generate(load_config(GenerateJob, words))
    assert (tmp_path / "rows.tsv").read_text().count("\n") == summary.num_rows + 1 == 501
    truth = np.stack(pq.read_table(f"{tmp_path}/rows.tsv{TEACHER_SUFFIX}").columns)
    assert truth.shape[1] == 500 and 0 < truth.min() < truth.max() < 1


def test_a_misspelt_setting_and_a_key_of_an_earlier_release_are_refused() -> None:
    words = ["data=histories", "data.generator"]
    with pytest.raises(ConfigError, match=names("data.generator.num_row 'num_rows'")):
        load_config(GenerateJob, [words[0], f"{words[1]}.num_row=5"])
    with pytest.raises(ConfigError, match=names("data.histories data.generator")):
        load_config(GenerateJob, [words[0], "data.histories.num_rows=5"])
    with pytest.raises(ConfigError, match=names("data.generator.kind histories")):
        load_config(GenerateJob, ["data=quickstart", "data.generator={kind: history}"])


def test_a_job_saved_by_an_earlier_release_is_read() -> None:
    text = job_to_yaml(load_config(TrainJob, ["experiment=histories_din"]))
    new = "generator: {kind: histories,"
    assert new in text
    old = text.replace(new, "user_item: null\n  histories: {")
    generator = job_from_yaml(TrainJob, old).data.read_generator()
    assert generator == HistoriesConfig()
