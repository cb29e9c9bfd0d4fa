"""Shards of a prediction are disjoint and complete, and together they are what a single run writes."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config.jobs.evaluate import PredictJob
from pipeline.data.raw.blocks import Source
from pipeline.runtime.errors import ConfigError, ServingError
from pipeline.serving.scoring.predict import predict
from pipeline.serving.scoring.prediction import PredictSummary, shard_output, sources_of_shard
from tests.serving.predictions import job_of, rows_of, write
from tests.serving.stand_in import REFUSED_CITY, StandIn
from tests.support.messages import mentions, names

NUM_FILES = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of different sizes, each with one row that cannot be scored."""
    folder = tmp_path_factory.mktemp("in")
    for number in range(NUM_FILES):
        rows = rows_of(20 + 30 * number, seed=number)
        rows[5]["city"] = REFUSED_CITY
        write(folder / f"part_{number}.csv", rows)
    return folder


def _shard(folder: Path, output: Path, shard: int, num_shards: int, *more: str) -> PredictSummary:
    words = [f"shard={shard}", f"num_shards={num_shards}", "id_columns=[user]", "max_quarantined_fraction=0.2", *more]
    return predict(job_of(folder, output, *words), lambda _: StandIn())


@pytest.mark.parametrize(("num_shards", "suffix"), [(3, "parquet"), (9, "parquet")])
def test_shards_together_are_a_single_run(folder: Path, tmp_path: Path, num_shards: int, suffix: str) -> None:
    _shard(folder, tmp_path / f"one.{suffix}", 0, 1)
    output, manifest = tmp_path / f"many.{suffix}", tmp_path / f"many.{suffix}.manifest.json"
    for shard in reversed(range(num_shards)):  # in no order that matters
        assert not manifest.exists()
        _shard(folder, output, shard, num_shards)
    said = json.loads(manifest.read_text())
    files = [tmp_path / each["file"] for each in said["shards"]]
    assert files == [Path(shard_output(str(output), shard, num_shards)) for shard in range(num_shards)]
    assert pa.concat_tables([pq.read_table(file) for file in files]).equals(pq.read_table(tmp_path / "one.parquet"))
    assert [name for each in said["shards"] for name in each["sources"]] == [f"part_{n}.csv" for n in range(NUM_FILES)]
    whole = json.loads((tmp_path / "one.parquet.json").read_text())["summary"]
    assert (said["num_rows"], said["num_refused"]) == (whole["num_rows"], whole["num_refused"]) == (770, NUM_FILES)
    refused = [path.read_text() for path in sorted(tmp_path.glob("many.shard-*.quarantine.jsonl"))]
    assert "".join(refused) == (tmp_path / "one.parquet.quarantine.jsonl").read_text()
    again = _shard(folder, output, 1, num_shards)
    assert again.already_scored and json.loads(manifest.read_text()) == said
    with pytest.raises(Exception, match=names("batch_rows overwrite=true")):
        _shard(folder, output, 1, num_shards, "batch_rows=50")
    _shard(folder, output, 1, num_shards, "batch_rows=50", "overwrite=true")
    assert not manifest.exists()  # the others are of another prediction


def test_shards_scored_by_two_versions_are_refused(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A shard that starts after a new delta or artifact does not go on where the others have an older one."""
    output, manifest = tmp_path / "many.parquet", tmp_path / "many.parquet.manifest.json"

    def shard(number: int, sequence: int, *more: str, meanwhile: bool = False) -> PredictSummary:
        words = [f"shard={number}", "num_shards=2", "id_columns=[user]", "max_quarantined_fraction=0.2", *more]

        class Changing(StandIn):
            def score(self, rows: object) -> object:  # type: ignore[override]
                if meanwhile and not self.batches:
                    shard(1, 2)
                return super().score(rows)  # type: ignore[arg-type]

        return predict(job_of(folder, output, *words), lambda _: Changing(f"stand-in+{sequence}"))

    said = names("shard 0 1 stand-in+1 stand-in+2 deltas= overwrite=true")
    with pytest.raises(ServingError, match=said):
        shard(0, 1, meanwhile=True)  # both had begun before either ended
    with pytest.raises(ServingError, match=said):
        shard(0, 1)
    assert not manifest.exists()
    shard(1, 1, "overwrite=true")
    assert {each["file"] for each in json.loads(manifest.read_text())["shards"]} == {
        Path(shard_output(str(output), number, 2)).name for number in range(2)
    }
    shard(0, 2, "overwrite=true")
    assert mentions(caplog.text, "no manifest yet stand-in+2") and not manifest.exists()
    with pytest.raises(ServingError, match=said):
        shard(1, 1)
    shard(1, 2, "overwrite=true")
    assert json.loads(manifest.read_text())["subject"]["artifact"] == "stand-in+2"


@pytest.mark.parametrize("sizes", [[1] * 10, [0, 0, 5], [100, 1, 1, 1], [3], [1, 1, 1, 1000]])
@pytest.mark.parametrize("num_shards", [1, 2, 3, 8])
def test_each_file_belongs_to_one_shard_and_shards_keep_the_order(sizes: list[int], num_shards: int) -> None:
    sources = [Source(f"/in/{n}", str(n), size, "digest") for n, size in enumerate(sizes)]
    shards = [sources_of_shard(sources, shard, num_shards) for shard in range(num_shards)]
    assert [source for shard in shards for source in shard] == sources


def test_a_shard_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match=names("shard 3 2")):
        PredictJob(artifact="a", source="b", output="c.csv", num_shards=3, shard=3)
    with pytest.raises(ConfigError, match=names("deltas=0")):
        PredictJob(artifact="a", source="b", output="c.csv", deltas=0)
