"""A file of faiss is refused before faiss reads it, or its search gives items that there are."""

from __future__ import annotations

import multiprocessing
import random
import struct
from pathlib import Path

import numpy as np
import pytest

from pipeline.config.serving import RetrievalConfig
from pipeline.extras.retrieval.index import index_class
from pipeline.runtime.errors import ServingError
from tests.support.examples import SEED

ITEMS, DIM = 400, 4


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pytest.importorskip("faiss")
    folder, made = tmp_path_factory.mktemp("indexes"), {}
    vectors = np.random.default_rng(0).normal(size=(ITEMS, DIM)).astype(np.float32)
    for kind in ("flat", "hnsw"):
        made[kind] = folder / kind
        index_class(kind).build(vectors, RetrievalConfig(neighbours=4)).write(str(made[kind]))
    return made


def _search(kind: str, path: Path, num_items: int = ITEMS, dim: int = DIM) -> None:
    index = index_class(kind).load(str(path), num_items, dim, 16)
    scores, positions = index.search(np.eye(3, DIM, dtype=np.float32), 5)
    assert scores.shape == positions.shape == (3, 5)
    assert positions.min() >= -1 and positions.max() < ITEMS


def _try_mutations(kind: str, content: bytes, path: Path, seeds: range) -> None:
    head, refused = 60 if kind == "flat" else len(content) - 4 * ITEMS * DIM, 0
    for seed in seeds:
        chosen, changed = random.Random(seed), bytearray(content)
        at = chosen.randrange(head)
        new = (changed[at] ^ 1 << chosen.randrange(8), 255, chosen.randrange(256))
        changed[at] = chosen.choice(new)
        if chosen.random() < 0.1:
            del changed[chosen.randrange(len(changed)) :]
        path.write_bytes(changed)
        try:
            _search(kind, path)
        except ServingError:
            refused += 1
    assert refused > len(seeds) // 20


@pytest.mark.parametrize("count", [150, pytest.param(10_000, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("kind", ["flat", "hnsw"])
def test_a_mutated_index_is_refused_or_finds_items(
    files: dict[str, Path], tmp_path: Path, kind: str, count: int
) -> None:
    _search(kind, files[kind])
    arguments = kind, files[kind].read_bytes(), tmp_path / "index", range(SEED, SEED + count)
    child = multiprocessing.get_context("fork").Process(target=_try_mutations, args=arguments)
    child.start()
    child.join()
    assert child.exitcode == 0  # a search that leaves its memory ends it by a signal


@pytest.mark.parametrize("kind", ["flat", "hnsw"])
def test_an_index_of_other_items_or_sizes_is_refused(files: dict[str, Path], tmp_path: Path, kind: str) -> None:
    other = files["hnsw" if kind == "flat" else "flat"]
    content = files[kind].read_bytes()
    (tmp_path / "huge").write_bytes(content[:37] + struct.pack("<Q", 1 << 38) + content[45:])  # of its first vector
    for path, num_items, dim in (
        (other, ITEMS, DIM), (files[kind], ITEMS - 1, DIM), (files[kind], ITEMS, DIM + 1), (tmp_path / "huge", ITEMS, DIM),
    ):  # fmt: skip
        with pytest.raises(ServingError, match="export again"):
            index_class(kind).load(str(path), num_items, dim, 16)
