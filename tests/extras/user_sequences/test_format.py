"""A file with a line of items for each user becomes rows with the last items left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.cli.command_line import load_config
from pipeline.cli.inspect import inspect
from pipeline.config.jobs.prepare import InspectJob, PrepareJob
from pipeline.config.jobs.train import TrainJob
from pipeline.data.dataset import load_dataset
from pipeline.data.prepare.run import prepare
from pipeline.extras.project.cli.init import InitJob, init
from pipeline.extras.user_sequences.format import _rows_of
from pipeline.runtime.errors import DataError


def test_the_last_items_of_a_user_are_left_out() -> None:
    rows = _rows_of([b"u1 a b c d", b"u2\ta", b"u3 a b", b"u4", b""]).to_pylist()
    assert [tuple(row.values()) for row in rows[:5]] == [
        ("u1", "b", ["a"], "1", 0),
        ("u1", "c", ["a", "b"], "1", 1),
        ("u1", "d", ["a", "b", "c"], "1", 2),
        ("u2", "a", [], "1", 0),
        ("u3", "b", ["a"], "1", 0),
    ]
    assert [row["item_id"] for row in rows[5:]] == [None, None]


def _lines(count: int) -> list[str]:
    return [
        " ".join([f"u{user}", *(f"i{user * place % 17}" for place in range(1, 4 + user % 3))]) for user in range(count)
    ]


def test_inspect_proposes_the_format_and_prepare_reads_the_proposed_config(tmp_path: Path) -> None:
    raw, proposed = tmp_path / "clicks.txt", tmp_path / "conf" / "data" / "clicks.yaml"
    raw.write_text("\n".join(_lines(60)))
    proposed.parent.mkdir(parents=True)
    said = inspect(load_config(InspectJob, [f"source={raw}", f"output={proposed}"]))
    assert "user_sequences" in said and "3 to 5 items of 17" in said
    with raw.open("ab") as file:
        file.write(b"\nu60\nu61 i1 i\xff i3\n")  # no item; no text
    words = ["--config-dir", str(tmp_path / "conf"), "data=clicks", f"source={raw}", f"data.path={tmp_path / 'data'}"]
    prepare(load_config(PrepareJob, [*words, "data.max_quarantined_fraction=0.1"]))
    dataset = load_dataset(str(tmp_path / "data"))
    # the line with bytes that are no text gives three rows: its test row does not hold them as its item
    assert {name: split.num_rows for name, split in dataset.splits.items()} == {
        "train": 61,
        "validation": 60,
        "test": 60,
    }
    reasons = (tmp_path / "data" / "quarantine.jsonl").read_text()
    assert "no item" in reasons and reasons.count("\n") == 3


def test_init_makes_a_project_that_retrieves_the_next_item(tmp_path: Path) -> None:
    raw, proposed, folder = tmp_path / "clicks.txt", tmp_path / "clicks.yaml", tmp_path / "project"
    raw.write_text("\n".join(_lines(60)))
    inspect(load_config(InspectJob, [f"source={raw}", f"output={proposed}"]))
    init(load_config(InitJob, [f"folder={folder}", f"data={proposed}", f"source={raw}"]))
    job = load_config(TrainJob, ["--config-dir", str(folder / "conf"), "experiment=clicks"])
    assert (job.model.kind, job.data.name, job.data.format) == ("sasrec", "clicks", "user_sequences")
    assert "importance_rows" not in (folder / "Makefile").read_text()


@pytest.mark.parametrize(
    "text", ["a,b,c\n1,2,3\n", "the cat sat\nit was a dog 2\nso be it\nwe 1 2\nno\n", "1 2\n" * 20]
)
def test_other_files_are_not_proposed(tmp_path: Path, text: str) -> None:
    raw = tmp_path / "rows.txt"
    raw.write_text(text)
    with pytest.raises(DataError):
        inspect(load_config(InspectJob, [f"source={raw}", f"output={tmp_path / 'rows.yaml'}"]))
