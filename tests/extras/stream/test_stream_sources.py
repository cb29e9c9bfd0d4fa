"""Growing files are read on from where they were, and the journal of what was read has no gap."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.retrain import RetrainJob
from pipeline.extras.stream.journal import Journal
from pipeline.extras.stream.source import Range
from pipeline.extras.stream.sources.folder import FolderSource
from pipeline.runtime.errors import ConfigError, DataError
from tests.extras.stream.following import CRITEO, FAST
from tests.support.messages import names


def _text(*lines: str) -> str:
    return "".join(f"{line}\n" for line in lines)


def _csv(folder: Path) -> FolderSource:
    data = load_config(
        RetrainJob,
        ["data.name=x", "data.format=csv", "data.columns.label=y", "data.columns.sparse=[a]", f"source={folder}"],
    ).data
    return FolderSource(str(folder), FAST, data)


def test_files_are_read_on_from_where_they_were_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "b.csv").write_text(_text("y,a", "1,u", "0,v") + "1,")
    (tmp_path / "_SUCCESS").write_text("")
    (tmp_path / "c.csv.partial").write_text(_text("y,a", "1,q"))
    source, offsets = _csv(tmp_path), {}
    first = source.read(offsets, 1)
    assert first is not None and (first.lines, first.begin, first.ends, first.names) == ([b"1,u"], 4, [8], ("y", "a"))
    offsets["b.csv"] = 8
    second = source.read(offsets, 9)
    assert second is not None and second.lines == [b"0,v"], "a line counts once it has its end"
    offsets["b.csv"] = second.range.end
    assert source.read(offsets, 9) is None and source.behind(offsets) == 2
    (tmp_path / "2026").mkdir()
    (tmp_path / "2026" / "a.csv").write_text(_text("a,y", "w,1"))  # columns of its own order
    with open(tmp_path / "b.csv", "a") as file:
        file.write(_text("x"))
    early = source.read(offsets, 9)
    assert early is not None and (early.partition, early.lines, early.names) == ("2026/a.csv", [b"w,1"], ("a", "y"))
    offsets[early.partition] = early.range.end
    grown = source.read(offsets, 9)
    assert grown is not None and grown.lines == [b"1,x"]
    assert source.reread(Range("b.csv", 4, 12)).lines == [b"1,u", b"0,v"]
    assert source.reread(Range("b.csv", 4, 12)).ends == [8, 12]
    assert source.newest() == {"2026/a.csv": 8, "b.csv": 16}
    (tmp_path / "b.csv").write_text("y,a\n")
    with pytest.raises(DataError, match=names("b.csv 12")):
        source.read(offsets, 9)


def test_a_file_that_is_written_anew_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "b.csv"
    path.write_text(_text("y,a", "1,u", "0,v"))
    source, offsets = _csv(tmp_path), {}
    first = source.read(offsets, 9)
    assert first is not None and first.num_rows == 2
    offsets["b.csv"] = first.range.end
    path.write_text(_text("y,a", "1,u", "0,w", "1,x"))  # in place, and longer than before
    with pytest.raises(DataError, match=names("12 b.csv anew")):
        source.read(offsets, 9)
    path.write_text(_text("y,a", "1,u", "0,v", "1,x"))
    other = tmp_path / "_other"
    other.write_text(path.read_text())
    other.replace(path)
    with pytest.raises(DataError, match=names("b.csv inode anew")):
        source.read(offsets, 9)
    for range_ in (Range("b.csv", 5, 12), Range("b.csv", 4, 11)):
        with pytest.raises(DataError, match=names("b.csv anew")):
            _csv(tmp_path).reread(range_)


def test_a_stream_that_begins_at_the_newest_row_waits_for_the_end_of_the_half_that_is_there(tmp_path: Path) -> None:
    path = tmp_path / "b.csv"
    path.write_text(_text("y,a", "1,u") + "0,")
    source = _csv(tmp_path)
    offsets = source.newest()
    assert source.read(offsets, 9) is None
    with open(path, "a") as file:
        file.write(_text("whole"))
    rows = source.read(offsets, 9)
    assert rows is not None and rows.lines == [b"0,whole"]  # it was the row `whole`


def test_what_no_stream_can_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=names("source")):
        FolderSource(str(tmp_path / "none"), FAST, CRITEO)
    words = ["experiment=quickstart", f"source={tmp_path}"]
    for wrong, named in [
        (["follow=true", "trainer.gradient_accumulation_steps=2"], "gradient_accumulation_steps"),
        (["follow=true", "stream.kind=kafka"], "bootstrap.servers"),
        (["follow=true", "stream.kind=kinesis"], "stream.kind"),
        (["publishing.when=every_minute"], "follow=true"),
    ]:
        with pytest.raises(ConfigError, match=names(named)):
            load_config(RetrainJob, [*words, *wrong])


def test_a_journal_gives_back_what_follows_without_a_gap(tmp_path: Path) -> None:
    path = tmp_path / "stream" / "journal.jsonl"
    journal = Journal(str(path))
    for batch in range(4):
        journal.append(batch, [Range("a", batch, batch + 1), Range("b", 0, batch)])
    journal.close()
    with open(path, "a") as file:
        file.write('{"batch": 4, "ranges": [["a", 4')
    journal = Journal(str(path))
    assert journal.after(2) == [[Range("a", 2, 3), Range("b", 0, 2)], [Range("a", 3, 4), Range("b", 0, 3)]]
    journal.append(4, [Range("c", 0, 9)])
    assert [each[0].partition for each in journal.after(2)] == ["a", "a", "c"]
    assert journal.after(7) == []
    journal.append(9, [])
    assert len(journal.after(0)) == 5, "what follows a gap is not known to be the batch after"
