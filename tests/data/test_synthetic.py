"""The draw is what its config says, down to the byte, and its best AUC is that of its own probabilities."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.cli.command_line import load_config
from pipeline.cli.generate import generate
from pipeline.config.columns import ColumnsConfig
from pipeline.config.data import DataConfig
from pipeline.config.generated import SyntheticConfig
from pipeline.config.jobs.prepare import GenerateJob, PrepareJob
from pipeline.data.generate import synthetic
from pipeline.data.generate.synthetic import hex_strings, power_law, write_source
from pipeline.data.prepare.run import prepare
from pipeline.data.quality import auc
from pipeline.data.raw.source import TEACHER_SUFFIX
from pipeline.runtime.errors import ConfigError, DataError
from tests.data.criteo_rows import read_split, run_prepare
from tests.support.messages import names

SMALL = SyntheticConfig(num_rows=4_500, seed=3)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("raw") / "rows.tsv"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic, "ROWS_PER_CHUNK", 1_000)
        write_source(SMALL, str(path), threads=2)
    return path


def test_equal_config_gives_equal_bytes_on_any_number_of_threads(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthetic, "ROWS_PER_CHUNK", 1_000)
    again = tmp_path / "rows.tsv"
    write_source(SMALL, str(again), threads=1)
    assert again.read_bytes() == source.read_bytes()
    assert Path(f"{again}{TEACHER_SUFFIX}").read_bytes() == Path(f"{source}{TEACHER_SUFFIX}").read_bytes()
    write_source(SyntheticConfig(num_rows=4_500, seed=4), str(again))
    assert again.read_bytes() != source.read_bytes()


def test_rows_are_in_the_format_of_criteo(source: Path) -> None:
    rows = [line.split("\t") for line in source.read_text().splitlines()]
    assert len(rows) == SMALL.num_rows and {len(row) for row in rows} == {40}
    assert {row[0] for row in rows} == {"0", "1"}
    dense = [cell for row in rows for cell in row[1:14]]
    assert "" in dense and "-1" in dense and all(cell.lstrip("-").isdigit() for cell in dense if cell)
    sparse = {cell for row in rows for cell in row[14:]} - {""}
    assert all(len(cell) == 8 and int(cell, 16) >= 0 for cell in sparse)
    for feature, cardinality in enumerate(SMALL.cardinalities):
        assert len({row[14 + feature] for row in rows} - {""}) <= cardinality


def test_labels_follow_the_probabilities_that_lie_beside_them(source: Path) -> None:
    labels = np.array([line[0] == "1" for line in source.read_text().splitlines()])
    truth = pq.read_table(f"{source}{TEACHER_SUFFIX}")[0].to_numpy()
    assert len(truth) == len(labels)
    assert truth.mean() == pytest.approx(SMALL.positive_rate, abs=0.02)
    for low, high in ((0.0, 0.1), (0.1, 0.3), (0.3, 0.6), (0.6, 1.0)):
        inside = (truth >= low) & (truth < high)
        error = np.sqrt(truth[inside].mean() / inside.sum())
        assert labels[inside].mean() == pytest.approx(truth[inside].mean(), abs=4 * error)
    logits = np.log(truth / (1 - truth))
    assert logits.std() == pytest.approx(SMALL.teacher_scale, rel=0.1)


def test_prepare_stores_the_best_auc_of_each_split_and_keeps_the_truth_out_of_the_shards(
    source: Path, tmp_path: Path
) -> None:
    lines = source.read_text().splitlines()
    spoilt = tmp_path / "rows.tsv"
    spoilt.write_text("".join(("spoilt" if i in (5, 4_000) else line) + "\n" for i, line in enumerate(lines)))
    Path(f"{spoilt}{TEACHER_SUFFIX}").write_bytes(Path(f"{source}{TEACHER_SUFFIX}").read_bytes())
    dataset = run_prepare(str(spoilt), tmp_path / "ds", max_quarantined_fraction=0.01)
    truth = np.delete(pq.read_table(f"{source}{TEACHER_SUFFIX}")[0].to_numpy(), [5, 4_000])
    begin = 0
    for split in ("train", "validation", "test"):
        table = read_split(tmp_path / "ds", dataset, split)
        labels = table["label"].to_numpy()
        expected = auc(truth[begin : begin + len(labels)], labels)
        assert dataset.bayes_auc[split] == pytest.approx(expected, abs=1e-9) and 0.75 < expected < 0.95
        assert table.num_columns == 40
        begin += len(labels)
    assert begin == 4_498


def test_side_file_of_another_draw_is_refused(source: Path, tmp_path: Path) -> None:
    lines = source.read_text().splitlines()[:100]
    (tmp_path / "rows.tsv").write_text("\n".join(lines))
    Path(f"{tmp_path}/rows.tsv{TEACHER_SUFFIX}").write_bytes(Path(f"{source}{TEACHER_SUFFIX}").read_bytes())
    with pytest.raises(DataError, match=names("4500 100")):
        run_prepare(str(tmp_path / "rows.tsv"), tmp_path / "ds")


@given(
    st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=30).filter(
        lambda rows: len({label for _, label in rows}) == 2
    )
)
def test_auc_equals_the_share_of_pairs_in_order(rows: list[tuple[int, bool]]) -> None:
    positives = [score for score, label in rows if label]
    negatives = [score for score, label in rows if not label]
    wins = sum((p > n) + (p == n) / 2 for p in positives for n in negatives)
    scores, labels = np.array([r[0] for r in rows], float), np.array([r[1] for r in rows], int)
    assert auc(scores, labels) == pytest.approx(wins / len(positives) / len(negatives))


@pytest.mark.parametrize("exponent", [0.7, 1.0, 1.2])
def test_ranks_follow_a_power_law_to_the_end_of_the_table(exponent: float) -> None:
    size = 1_000
    ranks = power_law((np.arange(2_000_000) + 0.5) / 2_000_000, size, exponent)
    assert ranks.min() == 1 and ranks.max() == size
    shares = np.bincount(ranks, minlength=size + 1)[1:] / len(ranks)
    x = np.linspace(1, size + 1, 1_000_001)
    weights = x**-exponent
    expected = np.add.reduceat(weights[:-1], np.searchsorted(x, np.arange(1, size + 1))) / weights[:-1].sum()
    np.testing.assert_allclose(shares[[0, 1, 9, 99, 998]], expected[[0, 1, 9, 99, 998]], rtol=0.03)


def test_different_ids_are_different_text() -> None:
    ids = np.arange(200_000)
    text = hex_strings(7, ids).to_pylist()
    assert text[0] is None and len(set(text[1:])) == len(ids) - 1


def test_generate_names_the_command_that_comes_next(tmp_path: Path) -> None:
    data = DataConfig(name="tiny", synthetic=SyntheticConfig(num_rows=200))
    summary = generate(GenerateJob(data=data, output=str(tmp_path / "new" / "tiny.tsv")))
    assert (tmp_path / "new" / "tiny.tsv").read_text().count("\n") == summary.num_rows == 200
    assert summary.next_command == f"python -m pipeline prepare data=tiny source={tmp_path}/new/tiny.tsv"
    with pytest.raises(ConfigError, match=names("data.generator data=quickstart")):
        GenerateJob(data=DataConfig(name="criteo_kaggle"))


def test_draw_that_is_not_in_criteos_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match=names("synthetic.num_dense 13 26")):
        DataConfig(name="drawn", synthetic=SyntheticConfig(cardinalities=[3, 4], num_interactions=1))
    with pytest.raises(ConfigError, match=names("data.columns 13")):
        columns = ColumnsConfig(dense=[f"int_{i}" for i in range(13)], sparse=["cat_0"])
        synthetic = SyntheticConfig(cardinalities=[3, 4], num_interactions=1)
        DataConfig(name="drawn", format="tsv", columns=columns, synthetic=synthetic)


def test_a_draw_with_columns_of_its_own_prepares_as_what_it_names(tmp_path: Path) -> None:
    names = ["data=rmc1", "data.columns.dense=[a,b]", "data.columns.sparse=[cat_x,cat_y,cat_z]"]
    drawn = ["data.synthetic.num_dense=2", "data.synthetic.cardinalities=[30,40,50]", "data.synthetic.num_rows=2000"]
    drawn += ["data.synthetic.num_interactions=1"]
    generate(load_config(GenerateJob, [*names, *drawn, f"output={tmp_path}/rows.tsv"]))
    path = f"data.path={tmp_path}/prepared"
    dataset = prepare(load_config(PrepareJob, [*names, *drawn, f"source={tmp_path}/rows.tsv", path])).dataset
    assert (dataset.dense_features, dataset.sparse_feature_names) == (["a", "b"], ["cat_x", "cat_y", "cat_z"])
    assert dataset.accepted_rows == 2000 and 0.6 < dataset.bayes_auc["train"] < 1
