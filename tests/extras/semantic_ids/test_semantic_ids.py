"""Semantic ids: codes follow planted clusters, are the same everywhere, and let a model score items that it has never seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.cli.command_line import load_config
from pipeline.config.columns import ColumnsConfig
from pipeline.config.data import DataConfig
from pipeline.config.jobs.prepare import PrepareJob
from pipeline.config.jobs.train import TrainJob
from pipeline.config.transforms import make_transform
from pipeline.data.prepare.run import prepare
from pipeline.data.raw.layout import layout_of
from pipeline.extras.semantic_ids.codebooks import Codebooks
from pipeline.extras.semantic_ids.config import SemanticIdsJob
from pipeline.extras.semantic_ids.learn import learn
from pipeline.runtime.errors import UserError
from tests.extras.models.planted_logs import train_on
from tests.models.learning import auc
from tests.serving.exports import assert_raw_rows_are_prepared_rows, run_export
from tests.support.messages import names
from tests.support.ranks import RankPool

WIDTH, COARSE, FINE, NUM_ITEMS = 8, 6, 5, 900
SETTINGS: dict[str, Any] = {"num_levels": 2, "num_codes": COARSE}


def _clusters() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Vectors [items, WIDTH] of clusters within clusters, and the number of both clusters of each item."""
    random = np.random.default_rng(5)
    coarse, fine = random.integers(0, COARSE, NUM_ITEMS), random.integers(0, FINE, NUM_ITEMS)
    centres, shifts = random.normal(0, 4, (COARSE, WIDTH)), random.normal(0, 1, (FINE, WIDTH))
    vectors = centres[coarse] + shifts[fine] + random.normal(0, 0.05, (NUM_ITEMS, WIDTH))
    return vectors.astype(np.float32), coarse, coarse * FINE + fine


def _write(folder: Path, vectors: np.ndarray) -> str:
    table = pa.table({"value": [f"i{number}" for number in range(len(vectors))], "vector": list(vectors)})
    pq.write_table(table, folder / "items.parquet")
    return str(folder / "items.parquet")


def _purity(codes: np.ndarray, clusters: np.ndarray) -> float:
    groups = [clusters[codes == code] for code in np.unique(codes)]
    return sum(np.bincount(group).max() for group in groups) / len(clusters)


def test_codes_follow_planted_clusters_and_are_the_nearest_rows(tmp_path: Path) -> None:
    vectors, coarse, both = _clusters()
    source = _write(tmp_path, vectors)
    for name in ("a", "b"):
        said = learn(SemanticIdsJob(vectors=source, output=f"{tmp_path}/{name}", **SETTINGS))
    table = pq.read_table(tmp_path / "a" / "codes.parquet")
    codes = np.stack([table[f"code_{level}"].to_numpy() for level in (1, 2)], axis=1)
    purities = _purity(codes[:, 0], coarse), _purity(codes[:, 0] * COARSE + codes[:, 1], both)
    print("purity of the first code and of both:", purities)
    assert table["value"].to_pylist()[7] == "i7" and purities[0] == 1.0 and purities[1] > 0.97
    text = (tmp_path / "a" / "codebooks.json").read_text()
    assert text == (tmp_path / "b" / "codebooks.json").read_text()  # by its seed
    books = Codebooks.of_text(text, "codebooks")
    for vector, found in zip(vectors[:50].astype(np.float64), codes, strict=False):
        for rows, code in zip(books.rows, found, strict=True):
            assert code == np.argmin(((vector - rows) ** 2).sum(axis=1))
            vector = vector - rows[code]
    report = json.loads((tmp_path / "a" / "report.json").read_text())
    _, sizes = np.unique(codes, axis=0, return_counts=True)
    assert report["distinct_ids"] == len(sizes) and report["largest_group"] == sizes.max()
    assert report["items_that_share_their_id"] == sizes[sizes > 1].sum() and f"{sizes[sizes > 1].sum():,} items" in said
    assert 0.8 < report["levels"][0]["explained_variance"] < report["levels"][1]["explained_variance"] < 1.0


def test_new_items_get_the_codes_of_their_neighbours_from_given_codebooks(tmp_path: Path) -> None:
    vectors, _, _ = _clusters()
    learn(SemanticIdsJob(vectors=_write(tmp_path, vectors), output=f"{tmp_path}/old", **SETTINGS))
    books = f"{tmp_path}/old/codebooks.json"
    learn(SemanticIdsJob(vectors=_write(tmp_path, vectors + 1e-4), output=f"{tmp_path}/new", codebooks=books))
    old, new = (pq.read_table(tmp_path / name / "codes.parquet") for name in ("old", "new"))
    assert old.equals(new) and (tmp_path / "new" / "codebooks.json").read_text() == Path(books).read_text()
    transform = make_transform("codes", {"kind": "semantic_id", "column": "emb", "width": WIDTH, "codebooks": books})
    columns = [pa.array(column, pa.float64()) for column in (*vectors[:3].T, [0.0, 1.0, 0.0])]
    first, second = old["code_1"].to_pylist()[0], old["code_2"].to_pylist()[0]
    made = transform.apply(columns).to_pylist()
    assert made[0] == [f"{first}", f"{first}.{second}"] and made[1] is None
    assert list(transform.inputs) == [*(f"emb[{number}]" for number in range(WIDTH)), "emb[missing]"]
    with pytest.raises(UserError, match=names("width=9 8 'emb'")):
        make_transform("codes", {"kind": "semantic_id", "column": "emb", "width": 9, "codebooks": books}).stored()
    apart = make_transform(
        "codes", {"kind": "semantic_id", "column": "emb", "width": WIDTH, "codebooks": books, "prefixes": False}
    )
    assert apart.apply(columns).to_pylist()[0] == [f"1:{first}", f"2:{second}"]


def test_items_with_equal_vectors_share_their_codes(tmp_path: Path) -> None:
    source = _write(tmp_path, np.eye(3, dtype=np.float32)[[0, 1, 2, 0, 0, 1, 0, 2, 0, 0]])
    said = learn(SemanticIdsJob(vectors=source, output=f"{tmp_path}/out", num_levels=2, num_codes=4))
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["distinct_ids"], report["items_that_share_their_id"], report["largest_group"]) == (3, 10, 6)
    assert report["levels"][0]["codes_in_use"] == 3 and "10 items (100.0 %)" in said


def test_bad_files_and_settings_are_refused(tmp_path: Path) -> None:
    vectors, _, _ = _clusters()
    source = _write(tmp_path, vectors[:40])
    (tmp_path / "bad.json").write_text('{"shape": [2, 3, 4], "float16": "AAAA"}')
    for settings, said in (
        ({"num_codes": 41}, "num_codes=41 40"),
        ({"num_levels": 16, "num_codes": 65536, "max_vectors": 70000}, "num_levels=16 num_codes=65536 4,000,000"),
        ({"codebooks": f"{tmp_path}/none.json"}, "none.json no such file"),
        ({"codebooks": f"{tmp_path}/bad.json"}, "bad.json 3 bytes [2, 3, 4]"),
        ({"codebooks": source}, "items.parquet codebooks.json semantic_ids"),
        ({"max_vectors": 10}, "max_vectors=10 num_codes=256"),
    ):
        with pytest.raises(UserError, match=names(said)):
            learn(SemanticIdsJob(vectors=source, output=f"{tmp_path}/out", **settings))
    pq.write_table(pa.table({"value": ["a", "a"], "vector": [[1.0], [2.0]]}), tmp_path / "twice.parquet")
    with pytest.raises(UserError, match=names("twice.parquet 2 vectors 1 values")):
        learn(SemanticIdsJob(vectors=f"{tmp_path}/twice.parquet", output=f"{tmp_path}/out"))


@pytest.mark.parametrize(
    ("vectors", "said"), [({}, "'emb' 4 data.columns.vectors.emb"), ({"emb": 3}, "'emb' 4 3 numbers")]
)
def test_a_vector_that_the_columns_do_not_have_is_refused(vectors: dict[str, int], said: str) -> None:
    codes = {"kind": "semantic_id", "column": "emb", "width": 4, "codebooks": "none.json"}
    data = DataConfig(
        name="x", format="parquet", columns=ColumnsConfig(sparse=["item"], vectors=vectors), transforms={"codes": codes}
    )
    with pytest.raises(UserError, match=names(said)):
        layout_of(data)


@pytest.mark.long
def test_items_without_a_row_are_ranked_by_their_codes(ranks: RankPool, tmp_path: Path) -> None:
    """Each cluster has an effect. The last quarter of the rows is of items that the training rows do not have."""
    vectors, _, both = _clusters()
    learn(SemanticIdsJob(vectors=_write(tmp_path, vectors[:600]), output=f"{tmp_path}/codes", **SETTINGS))
    random, num_rows = np.random.default_rng(0), 16_000
    items = np.where(np.arange(num_rows) < 12_000, random.integers(0, 600, num_rows), random.integers(600, NUM_ITEMS, num_rows))  # fmt: skip
    truth = 1 / (1 + np.exp(-random.normal(0, 2, COARSE * FINE)[both[items]]))
    clicks = random.random(num_rows) < truth
    rows = pa.table({"label": clicks.astype(int), "item": [f"i{item}" for item in items], "emb": list(vectors[items])})
    pq.write_table(rows, tmp_path / "rows.parquet")
    codes = f"data.transforms={{codes: {{kind: semantic_id, column: emb, width: {WIDTH}, codebooks: {tmp_path}/codes/codebooks.json}}}}"
    found = {}
    for name, more in (("codes", [codes]), ("row", [])):
        data = ["data=default", "data.name=items", "data.format=parquet", "data.columns.sparse=[item]", f"data.columns.vectors={{emb: {WIDTH}}}",
                f"data.path={tmp_path}/{name}", "data.rows_per_row_group=500", "data.split.validation_fraction=0.25", "data.split.test_fraction=0",
                *more]  # fmt: skip
        prepare(load_config(PrepareJob, [*data, f"source={tmp_path}/rows.parquet", "threads=1"]))
        job = [*data, "model=logistic_regression", "tables.default.embedding_dim=4", "trainer.global_batch_size=256", "trainer.epochs=4",
               "optimizer=adam", "optimizer.dense.lr=0.01", "optimizer.sparse.lr=0.02", "hardware=cpu", "checkpoint=at_end", "logger.report=false",
               "logger.tensorboard=false", f"run_dir={tmp_path}/run_{name}"]  # fmt: skip
        found[name] = train_on(ranks, 2 if more else 1, job).validation["auc"]
        if more:
            (tmp_path / "codes" / "codebooks.json").rename(tmp_path / "moved.json")  # an artifact needs no file
            exported = run_export(tmp_path / "run_codes", tmp_path / "artifact", "precision=fp32")
            (tmp_path / "moved.json").rename(tmp_path / "codes" / "codebooks.json")
            assert_raw_rows_are_prepared_rows(exported.artifact, load_config(TrainJob, job), f"{tmp_path}/rows.parquet")
    best = auc(truth[12_000:], clicks[12_000:])
    print("AUC of new items", found, "best", best)
    assert found["codes"] > best - 0.01 and found["row"] < best - 0.05
