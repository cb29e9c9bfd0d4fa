"""trainer.loss.position: the planted effect of places is learnt apart from items, and is not served."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from pipeline.cli.command_line import load_config
from pipeline.config.data import ReaderConfig
from pipeline.config.jobs.evaluate import PredictJob
from pipeline.config.jobs.train import TrainJob
from pipeline.data.dataset import load_dataset
from pipeline.data.read.reader import ShardReader
from pipeline.data.targets import Target
from pipeline.extras.models.tasks.reshaped_click import PositionBias
from pipeline.extras.stream.encode import LineEncoder
from pipeline.extras.stream.source import Lines
from pipeline.runtime.errors import ConfigError
from pipeline.serving.scoring.predict import predict
from tests.extras.models.planted_logs import ITEM_LOGITS, NUM_ITEMS, job, prepared, train_on
from tests.extras.stream.following import FAST
from tests.serving.exports import run_export
from tests.support.messages import names
from tests.support.ranks import RankPool


def _served(run: Path, folder: Path) -> np.ndarray:
    """The logit of each item, by the artifact that `export` makes of the run."""
    run_export(str(run), run / "artifact", "precision=fp32", "parity.max_ne_increase=1")
    (folder / "items.csv").write_text("\n".join(["item", *map(str, range(NUM_ITEMS)), ""]))
    words = [f"artifact={run}/artifact", f"source={folder}/items.csv", f"output={run}/scores.parquet"]
    predict(load_config(PredictJob, words))
    scores = pq.read_table(run / "scores.parquet")["score"].to_numpy()
    return np.log(scores / (1 - scores))


@pytest.mark.long
def test_planted_places_are_removed_from_the_scores_that_are_served(ranks: RankPool, tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    biased = ["trainer.loss.position=place", "trainer.loss.num_positions=6"]
    with_places = train_on(ranks, 2, job(folder, tmp_path / "places", *biased))
    without = train_on(ranks, 2, job(folder, tmp_path / "plain"))
    errors = [np.abs(_served(tmp_path / name, folder) - ITEM_LOGITS).mean() for name in ("places", "plain")]
    print("error of item logits", errors, "NE", with_places.validation["ne"], without.validation["ne"])
    assert errors[0] < 0.12 and errors[1] > 5 * errors[0]
    assert with_places.validation["ne"] < without.validation["ne"] - 0.03
    assert with_places.validation["calibration"] == pytest.approx(1.0, abs=0.1)


def test_rows_of_a_stream_and_of_a_prepared_split_have_their_places(tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    data = load_config(TrainJob, job(folder, tmp_path / "run")).data
    lines = [line.encode() for line in (folder / "rows.csv").read_text().splitlines()[1:41]]
    places = torch.tensor([[float(line.split(b",")[2])] for line in lines])
    dataset, click = load_dataset(data.path), [Target("click")]
    names_of_cells = ("click", "seconds", "place", "teacher", "list", "item")
    encoder = LineEncoder(data, dataset, FAST, click, lambda features: features, (), ["place"])
    assert torch.equal(encoder.encode([Lines("a", 0, lines, list(range(40)), names_of_cells)]).batch.aside, places)
    config = ReaderConfig(shuffle="none", num_streams=1)
    reader = ShardReader(data.path, dataset, "train", global_batch_size=40, rank=0, world_size=1, config=config, seed=0, aside=["place"])  # fmt: skip
    batches = reader.batches(0)
    assert torch.equal(next(batches).aside, places)
    batches.close()


def test_places_beyond_the_last_count_as_the_last_and_the_reference_as_0() -> None:
    bias = PositionBias(3, reference=1)
    with torch.no_grad():
        bias.places.copy_(torch.tensor([0.5, 0.25, -1.0]))
    assert bias(torch.tensor([0.0, 1.0, 2.0, 9.0, -4.0])).tolist() == [0.25, 0.0, -1.25, -1.25, 0.25]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("trainer.loss.position=plac", "trainer.loss 'plac' data.columns.labels"),
        ("trainer.loss.position=click", "trainer.loss 'click' data.columns.labels"),
        ("trainer.loss.position=place trainer.loss.num_positions=1", "trainer.loss.num_positions=1 at least 2"),
        ("trainer.loss.position=place trainer.loss.reference_position=100", "trainer.loss.reference_position=100 99"),
    ],
)
def test_bad_settings_are_refused(words: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=names(told)):
        load_config(TrainJob, job(tmp_path, tmp_path / "run", *words.split()))
