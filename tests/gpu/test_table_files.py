"""Frozen tables, tables that start from files and columns of vectors train on a GPU as on the CPU, through a resume."""

from __future__ import annotations

from pathlib import Path

from tests.extras.table_files.combined import prepared, words_of_tables
from tests.gpu.conftest import Gpus
from tests.gpu.test_matrix import assert_same


def test_tables_of_files_and_vectors_equal_the_cpus_through_a_resume(gpus: Gpus, tmp_path: Path) -> None:
    words = [*prepared(tmp_path), *words_of_tables(tmp_path), "tables.item.sharding.sharding_types=[row_wise]"]
    jobs = {}
    for place in ("cpu", "gpu"):
        gpus.train(1, [*words, "trainer.max_steps=2"], tmp_path / place, on=place)
        jobs[place] = gpus.train(2, [*words, "trainer.max_steps=4"], tmp_path / place, on=place)
    assert_same(jobs["gpu"], jobs["cpu"])
