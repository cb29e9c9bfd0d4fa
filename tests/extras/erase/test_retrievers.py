"""An erased item leaves the catalogue of a retriever, an erased user has the vector of an unknown one, and no other answer changes."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipeline.checkpoint.chains import open_tensors
from pipeline.checkpoint.steps import list_steps, step_path
from pipeline.checkpoint.tables import inventory_of_step
from pipeline.cli.command_line import load_config
from pipeline.config.jobs.evaluate import ExportJob
from pipeline.data.dataset import load_dataset
from pipeline.extras.erase.config import EraseJob
from pipeline.extras.erase.datasets import id_of
from pipeline.extras.erase.run import erase
from pipeline.extras.retrieval.queries import Wish
from pipeline.extras.retrieval.retriever import Retriever
from pipeline.extras.retrieval.tower import load_tower
from pipeline.serving.artifact.export import export
from pipeline.serving.artifact.manifest import ITEM_VECTORS, read_manifest
from pipeline.serving.scoring.artifact_files import ArtifactFiles
from pipeline.training.summary import TrainSummary
from tests.end_to_end.conftest import user_item_data, user_item_run  # noqa: F401
from tests.extras.erase.test_erase import holding

pytestmark = pytest.mark.long
NUM_ITEMS, ITEM, USER = 60, "7", "31"


def answers(artifact: Path, rows: list[dict[str, object]], without: str) -> list[tuple[list[str], np.ndarray]]:
    """The best items of each row without one item, and their scores."""
    retriever = Retriever.load(str(artifact))
    found = retriever.retrieve(pa.Table.from_pylist(rows), [(1, Wish(20, excluded=(without,))) for _ in rows])
    assert all(each is not None for each in found.scores)
    return [(retriever.items.values_at(each.positions).to_pylist(), each.scores) for each in found.scores]


def rows_of(folder: Path, feature: str, value: str, run: str) -> set[bytes]:
    """The value's rows in the steps of a run, read without the erasing code."""
    dataset = load_dataset(str(folder / "data"))
    row, found = id_of(str(folder / "data"), dataset.sparse_feature(feature), value), set()
    assert row is not None
    for step in list_steps(steps := str(folder / run / "checkpoints")):
        tensors = open_tensors(step_path(steps, step))
        table = inventory_of_step(tensors).tables[feature]
        found.add(tensors.read(table.key, [row, 0], [1, table.dim]).numpy().tobytes())
    return found


def vectors_of_items(artifact: Path) -> dict[str, bytes]:
    manifest, items = read_manifest(str(artifact)), Retriever.load(str(artifact)).items
    assert manifest.retrieval is not None and len(items) == manifest.retrieval.num_items
    vectors = np.frombuffer(ArtifactFiles(str(artifact), manifest, verify=True).content(ITEM_VECTORS), "<f4")
    names = items.values_at(np.arange(len(items))).to_pylist()
    return dict(zip(names, map(bytes, vectors.reshape(len(items), -1)), strict=True))


def agree(one: tuple[list[str], np.ndarray], other: tuple[list[str], np.ndarray]) -> bool:
    """A product of a matrix with one row less may round differently in the last bit."""
    return one[0] == other[0] and np.allclose(one[1], other[1], rtol=1e-5, atol=1e-7)


@pytest.fixture
def two_tower(user_item_data: str, user_item_run: TrainSummary, tmp_path: Path) -> Path:  # noqa: F811
    shutil.copytree(user_item_data, tmp_path / "data")
    shutil.copy(Path(user_item_data).parent / "rows.tsv", tmp_path / "rows.tsv")
    shutil.copytree(user_item_run.run_dir, tmp_path / "run")
    for name, words in (("exact", ["precision=int8"]), ("hnsw", ["precision=fp32", "retrieval.index=hnsw"])):
        if name == "hnsw":
            pytest.importorskip("faiss")
        given = [f"run={tmp_path}/run", f"output={tmp_path}/{name}", "parity.splits=[validation]", *words]
        export(load_config(ExportJob, given))
    return tmp_path


@pytest.mark.parametrize(("feature", "value"), [("item_id", ITEM), ("user_id", USER)])
def test_item_or_user_of_a_two_tower_is_erased(two_tower: Path, feature: str, value: str) -> None:
    users = [{"user_id": str(number), "user_group": "3"} for number in (*range(0, 100, 7), USER, "nobody")]
    folders = {name: two_tower / name for name in ("exact", "hnsw")}
    before = {name: (answers(path, users, ITEM), vectors_of_items(path)) for name, path in folders.items()}
    patterns = rows_of(two_tower, feature, value, "run")
    if feature == "item_id":
        patterns |= {vectors[value] for _, vectors in before.values()}
    assert len(holding(two_tower, patterns)) >= 2 and len(patterns) >= 2
    result = erase(EraseJob(feature=feature, value=value, folders=[str(two_tower)]))
    assert result.left == {} and holding(two_tower, patterns) == []
    for name, path in folders.items():
        (answered, vectors), after, kept = before[name], answers(path, users, ITEM), vectors_of_items(path)
        if feature == "item_id":
            assert all(map(agree, after, answered))
            assert kept == {item: vector for item, vector in vectors.items() if item != value}
            files = ArtifactFiles(str(path), read_manifest(str(path)), verify=True)
            tower = load_tower(files, "item", "ram", None, None, False)
            erased, unknown = tower.score(pa.table({"item_id": [value, "nothing"], "item_genre": ["1", "1"]})).scores
            assert np.array_equal(erased, unknown)
        else:
            assert kept == vectors and all(map(agree, after[:-2], answered[:-2]))
            assert agree(after[-1], answered[-1]) and agree(after[-2], after[-1])
            assert not agree(after[-2], answered[-2])
