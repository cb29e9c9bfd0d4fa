"""The scan finds a value in every kind of file, and plain files lose its rows and nothing else."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.data.read.endless import FILE, Known, to_bytes
from pipeline.extras.erase.config import EraseJob
from pipeline.extras.erase.folders import Rewritten, recover
from pipeline.extras.erase.plain_files import erase_from_file
from pipeline.extras.erase.run import erase
from pipeline.extras.erase.scan import found_in
from pipeline.extras.erase.target import Target
from pipeline.runtime.errors import ConfigError, UserError
from pipeline.serving.artifact.deltas import NewIds, values_to_bytes

USER = 'ä"b-77'


def write_kinds(folder: Path, value: str) -> None:
    table = pa.table({"n": [1], "nested": [[{"of": [value]}]]})
    pq.write_table(table, folder / "a.parquet", compression="zstd")
    with pa.ipc.new_file(folder / "b.arrow", table.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as file:
        file.write_table(table)
    (folder / "c.jsonl").write_text(json.dumps({"x": value}))
    (folder / "d.bin").write_bytes(b"\x00\xff" + value.encode("utf-16-le"))
    (folder / "e.gz").write_bytes(gzip.compress(value.encode()))
    (folder / "f.zst").write_bytes(pa.Codec("zstd").compress(value.encode(), asbytes=True))
    (folder / "g.json.z").write_bytes(zlib.compress(json.dumps([value], ensure_ascii=False).encode()))
    with zipfile.ZipFile(folder / "h.pt2", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("inner", "-" * 20_000 + value)
    (folder / "i.csv").write_text('a\n"' + value.replace('"', '""') + '"\n')
    (folder / "j.bin").write_bytes(b"\x00" * ((8 << 20) - 3) + value.encode())  # across two blocks


def test_every_kind_of_file_is_searched(tmp_path: Path) -> None:
    target = Target("user", USER)
    for name, value in (("with", USER), ("without", USER + "8")):
        (folder := tmp_path / name).mkdir()
        write_kinds(folder, value)
        found = {path.name for path in folder.iterdir() if found_in(target, str(path))}
        binary = {"d.bin", "j.bin"}  # without words, a longer value contains the shorter one
        assert found == ({path.name for path in folder.iterdir()} if name == "with" else binary)
    named = tmp_path / f"user={USER.replace(chr(34), '')}.txt"
    named.write_text("")
    assert found_in(Target("user", "äb-77"), str(named)) == "the value in its name"


def test_short_numbers_are_found_with_their_column_only(tmp_path: Path) -> None:
    target, path = Target("user", "17"), tmp_path / "a.txt"
    for text, wanted in (
        ('{"user": 17}', True),
        ("user=17", True),
        ('["17"]', True),
        ("step 17", False),
        ('{"user": 170}', False),
    ):
        path.write_text(text)
        assert bool(found_in(target, str(path))) == wanted, text
    pq.write_table(pa.table({"user": [17], "n": [1]}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"user": [1], "n": [17]}), tmp_path / "c.parquet")
    assert found_in(target, str(tmp_path / "b.parquet")) == "the value in column 'user'"
    assert not found_in(target, str(tmp_path / "b.parquet"), with_ids=True)
    assert not found_in(target, str(tmp_path / "c.parquet"))


def test_bytes_of_a_row_are_found_unless_they_are_common(tmp_path: Path) -> None:
    target, path = Target("user", USER), tmp_path / "a.bin"
    target.add_row(bytes(range(16)), bytes(16))
    target.add_row(bytes(16), bytes(range(16)))
    path.write_bytes(bytes(100) + bytes(range(16)))
    assert found_in(target, str(path)) == "the bytes of its row" and len(target.rows) == 1


def test_an_equal_value_of_another_feature_is_not_the_value(tmp_path: Path) -> None:
    target = Target("user", "7000123", others={"item"})
    for name, column, wanted in (
        ("item", ["7000123"], ""), ("item", [["7", "7000123"]], ""), ("item", ["of 7000123"], "the value in column 'item'"),
        ("user", ["7000123"], "the value in column 'user'"), ("note", ["7000123"], "the value in column 'note'"),
    ):  # fmt: skip
        pq.write_table(pa.table({name: column}), tmp_path / "a.parquet")
        assert found_in(target, str(tmp_path / "a.parquet")) == wanted, (name, column)
    for name in ("item", "user"):
        added = Known({name: ["5", "7000123"]}, {})
        (tmp_path / FILE).write_bytes(to_bytes(added))
        (tmp_path / "values.json").write_bytes(values_to_bytes({name: NewIds(9, added.values[name])}))
        assert {found_in(target, str(tmp_path / each)) for each in (FILE, "values.json")} == {
            "the value" if name == "user" else ""
        }


def test_plain_files_lose_the_rows_of_the_value(tmp_path: Path) -> None:
    rows = {"user": [USER, "u2", None], "score": [1.0, 2.0, 3.0]}
    pq.write_table(pa.table(rows), tmp_path / "a.parquet")
    (tmp_path / "b.tsv").write_text(f'score\tuser\n1\t"{USER.replace(chr(34), chr(34) * 2)}"\n2\tu2\n3\t"two\nlines"\n')
    (tmp_path / "c.jsonl").write_text(
        "".join(json.dumps({"user": user, "s": 1}) + "\n" for user in (USER, ["u2", USER], "u2"))
    )
    (tmp_path / "d.log").write_text(f"asked {USER}, and {USER}8\n")
    target = Target("user", USER)
    for path in sorted(tmp_path.iterdir()):
        assert erase_from_file(target, str(path)) and not found_in(target, str(path))
    assert pq.read_table(tmp_path / "a.parquet").to_pydict() == {"user": ["u2", None], "score": [2.0, 3.0]}
    assert (tmp_path / "b.tsv").read_text() == 'score\tuser\n2\tu2\n3\t"two\nlines"\n'
    assert (tmp_path / "c.jsonl").read_text() == '{"user": "u2", "s": 1}\n'
    assert (tmp_path / "d.log").read_text() == f"asked erased, and {USER}8\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.parquet", "b.tsv", "c.jsonl", "d.log"]


def test_replaced_folder_is_the_old_or_the_new_one_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename
    for turn, renames in enumerate((0, 1, 1, 2)):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        (tmp_path / "run/below").mkdir(parents=True)
        (tmp_path / "run/below/a").write_text("old")
        folder = Rewritten(str(tmp_path / "run"))
        Path(folder.new("below/a")).write_text("new")
        left = [renames]

        def limited(*words: str, left: list[int] = left) -> None:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            rename(*words)

        monkeypatch.setattr(os, "rename", limited)
        with suppress(KeyboardInterrupt):
            folder.commit()
        monkeypatch.undo()
        recover(str(tmp_path / "run" if turn % 2 else tmp_path))
        assert (tmp_path / "run/below/a").read_text() == ("old" if renames == 0 else "new")
        assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_bad_words_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give registry"):
        EraseJob(feature="user", value="u1")
    with pytest.raises(ConfigError, match="is an object store"):
        EraseJob(feature="user", value="u1", folders=["s3://bucket/run"])
    with pytest.raises(UserError, match="there is no"):
        erase(EraseJob(feature="user", value="u1", folders=[str(tmp_path / "absent")]))
