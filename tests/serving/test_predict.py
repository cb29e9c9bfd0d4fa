"""Raw files to scores: every row once and in its place, whatever the format, in bounded memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from pipeline.runtime.errors import DataError, ServingError
from pipeline.serving.scoring.predict import describe, predict
from tests.serving.predictions import expected, job_of, rows_of, write
from tests.serving.stand_in import REFUSED_CITY, StandIn, score_of
from tests.support.messages import mentions, names


@pytest.mark.parametrize("name", ["rows.parquet", "rows.csv", "rows.tsv", "rows.csv.gz"])
def test_every_row_is_scored_in_its_place_whatever_the_format(tmp_path: Path, name: str) -> None:
    rows = rows_of(2500)
    source, output = write(tmp_path / name, rows), tmp_path / "scores.parquet"
    summary = predict(job_of(source, output, "id_columns=[user]", "batch_rows=700"), lambda _: StandIn())
    scored = pq.read_table(output)
    assert scored.column_names == ["row", "user", "score"]
    assert scored["row"].to_pylist() == list(range(2500))
    assert scored["user"].to_pylist() == [row["user"] for row in rows]
    assert scored["score"].to_pylist() == expected(rows)
    assert (summary.num_rows, summary.num_refused) == (2500, 0)
    assert not (tmp_path / "scores.parquet.partial").exists()


def test_a_folder_is_scored_in_natural_order_with_the_files_names(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name, seed in (("day_10.csv", 1), ("day_2.csv", 2)):
        write(folder / name, rows_of(30, seed))
    predict(job_of(folder, tmp_path / "out.csv"), lambda _: StandIn())
    scored = pyarrow.csv.read_csv(tmp_path / "out.csv")
    assert scored["file"].to_pylist() == ["day_2.csv"] * 30 + ["day_10.csv"] * 30
    assert scored["score"].to_pylist() == pytest.approx(expected(rows_of(30, 2)) + expected(rows_of(30, 1)))


def test_bad_rows_have_no_score_and_stand_in_the_quarantine_with_file_line_and_reason(tmp_path: Path) -> None:
    rows = rows_of(400)
    rows[7]["price"], rows[31]["city"] = "cheap", REFUSED_CITY
    source, output = write(tmp_path / "rows.csv", rows), tmp_path / "scores.parquet"
    with pytest.raises(ServingError, match=names("400 0.50% cheap")):
        predict(job_of(source, output, "max_quarantined_fraction=0.001"), lambda _: StandIn())
    assert not output.exists()
    summary = predict(job_of(source, output, "id_columns=[user]"), lambda _: StandIn())
    scored = pq.read_table(output)
    assert [number for number, score in enumerate(scored["score"].to_pylist()) if score is None] == [7, 31]
    assert scored["user"].to_pylist()[31:33] == ["u31", "u32"]  # a row that was read keeps what it brought
    lines = [json.loads(line) for line in Path(f"{output}.quarantine.jsonl").read_text().splitlines()]
    assert [(line["file"], line["line"], line["reason"]) for line in lines] == [
        ("rows.csv", 9, "price is 'cheap', not a finite 32-bit number"),
        ("rows.csv", 33, f"city is {REFUSED_CITY!r}"),
    ]
    assert mentions(describe(summary), "2 without a score columns row, user, score") and "id_columns" not in describe(
        summary
    )


def test_a_file_of_another_kind_is_given_up_early_with_its_reason(tmp_path: Path) -> None:
    rows = rows_of(3000)
    for row in rows:
        row["price"] = "cheap"
    source = write(tmp_path / "rows.csv", rows)
    with pytest.raises(ServingError, match=names("3,000 rows.csv cheap")):
        predict(job_of(source, tmp_path / "out.parquet"), lambda _: StandIn())


def test_criteo_rows_are_scored_with_their_labels_or_without(samples: Path, tmp_path: Path) -> None:
    from pipeline.data.raw.formats.criteo_tsv import criteo_columns
    from tests.serving.stand_in import Scored

    class Criteo(StandIn):
        def score(self, rows: pa.Table) -> Scored:
            import numpy as np

            ids = np.array([len(str(row)) for row in rows.to_pylist()], dtype=np.float32)
            return Scored(ids, [])

    lines = (samples / "criteo_kaggle_head10k.txt").read_text().splitlines()[:500]
    (tmp_path / "with.txt").write_text("\n".join(lines) + "\n")
    (tmp_path / "without.txt").write_text("\n".join(line.split("\t", 1)[1] for line in lines) + "\n")
    tables = []
    for name in ("with", "without"):
        predict(
            job_of(tmp_path / f"{name}.txt", tmp_path / f"{name}.parquet"), lambda _: Criteo(columns=criteo_columns())
        )
        tables.append(pq.read_table(tmp_path / f"{name}.parquet"))
    assert tables[0].num_rows == 500 and tables[0] == tables[1]


def test_the_same_command_again_has_nothing_to_do_and_another_is_refused(tmp_path: Path) -> None:
    source, output = write(tmp_path / "rows.parquet", rows_of(50)), tmp_path / "scores.parquet"
    lines = describe(predict(job_of(source, output), lambda _: StandIn())).splitlines()
    assert lines[-2].endswith("columns row, score") and mentions(lines[-1], "next `row` id_columns=[NAME]")
    before = output.stat()
    assert "nothing to do" in describe(predict(job_of(source, output), lambda _: StandIn()))
    assert output.stat() == before
    with pytest.raises(ServingError, match=names("overwrite=true")):
        predict(job_of(source, output), lambda _: StandIn("stand-in-2"))
    assert output.stat() == before
    predict(job_of(source, output, "overwrite=true"), lambda _: StandIn("stand-in-2"))
    assert pq.read_table(output)["score"].to_pylist() == [score_of(row, "stand-in-2") for row in rows_of(50)]
    (tmp_path / "mine.parquet").write_bytes(b"not ours")
    with pytest.raises(ServingError, match=names("mine.parquet.json")):
        predict(job_of(source, tmp_path / "mine.parquet"), lambda _: StandIn())


@pytest.mark.campaign
def test_memory_does_not_grow_with_the_source(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pipeline.cli.command_line import load_config\nfrom pipeline.config.jobs.evaluate import PredictJob\n"
        "from pipeline.serving.scoring.predict import predict\n"
        "import numpy as np\n"
        "from tests.serving.stand_in import StandIn, Scored\n"
        "class Fast(StandIn):\n"
        "    def score(self, rows): return Scored(np.zeros(rows.num_rows, np.float32), [])\n"
        "predict(load_config(PredictJob, sys.argv[1:]), lambda _: Fast())\n"
        "status = open('/proc/self/status').read()\n"
        "print(int(status.split('VmHWM:')[1].split()[0]) >> 10)\n"
    )
    used = []
    for count in (200_000, 2_000_000):
        table = pa.table(
            {"price": pa.array([1.5] * count), "age": pa.array([2.0] * count), "city": ["Rom"] * count,
             "device": ["a"] * count, "tags": pa.array([["x", "y"]] * count)}
        )  # fmt: skip
        source = tmp_path / f"{count}.parquet"
        pq.write_table(table, source, row_group_size=50_000)
        options = ["artifact=stand-in", f"source={source}", f"output={source}.scores.parquet", "rows_per_part=100000"]
        done = subprocess.run(
            [sys.executable, "-c", code, *options],
            capture_output=True,
            text=True,
            check=True,
        )
        used.append(int(done.stdout.split()[-1]))
    assert used[1] < used[0] + 100, f"{used} MiB for 200,000 and 2,000,000 rows"


@pytest.mark.parametrize("source", ["", "/*.parquet", "/rows.parquet"])
def test_an_output_among_its_own_sources_is_refused(tmp_path: Path, source: str) -> None:
    write(tmp_path / "rows.parquet", rows_of(5))
    output = tmp_path / ("rows.parquet" if source == "/rows.parquet" else "scores.parquet")
    with pytest.raises(ServingError):
        predict(job_of(f"{tmp_path}{source}", output), lambda _: StandIn())


def test_a_column_that_is_missing_is_named_with_the_nearest(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.csv", rows_of(5))
    with pytest.raises(DataError, match=names("usr user")):
        predict(job_of(source, tmp_path / "out.parquet", "id_columns=[usr]"), lambda _: StandIn())


def test_an_empty_file_has_no_rows_to_score(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    write(tmp_path / "source/rows.csv", rows_of(5))
    (tmp_path / "source/none.csv").touch()
    both = predict(job_of(str(tmp_path / "source"), tmp_path / "both.parquet"), lambda _: StandIn())
    alone = predict(job_of(str(tmp_path / "source/none.csv"), tmp_path / "alone.parquet"), lambda _: StandIn())
    assert (both.num_rows, alone.num_rows) == (5, 0)


@pytest.mark.parametrize("words", [[], ["escape_formulas=false"]])
def test_text_that_a_spreadsheet_would_run_is_escaped(tmp_path: Path, words: list[str]) -> None:
    texts = ["=HYPERLINK(http://host)", "+1+cmd", "-2.5e3", "-x", "@SUM(A1)", "plain"]
    rows = [{**row, "user": text} for row, text in zip(rows_of(len(texts)), texts, strict=True)]
    source = write(tmp_path / "rows.csv", rows)
    predict(job_of(source, tmp_path / "out.csv", "id_columns=[user]", *words), lambda _: StandIn())
    found = pyarrow.csv.read_csv(tmp_path / "out.csv").to_pydict()
    escaped = ["'=HYPERLINK(http://host)", "'+1+cmd", "-2.5e3", "'-x", "'@SUM(A1)", "plain"]
    assert found["user"] == (texts if words else escaped)
    assert found["score"] == pytest.approx(expected(rows))
