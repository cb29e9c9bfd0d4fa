"""Fault 15: mutated lines. Nothing crashes, accepted + quarantined = input, and no accepted row has its columns shifted."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config.columns import ColumnsConfig
from pipeline.config.data import SplitConfig
from pipeline.data.dataset import Dataset
from tests.data.criteo_rows import read_split, run_prepare
from tests.faults.conftest import FaultRecorder
from tests.support.examples import SEED

FIRST_SEED = 2026 + SEED
NAMES = ("y", "x0", "x1", "a", "b", "c")
COLUMNS = ColumnsConfig(label="y", dense=["x0", "x1"], sparse=["a", "b", "c"])
NO_SPLIT = SplitConfig(validation_fraction=0.0, test_fraction=0.0)


def sound_line(draw: random.Random, delimiter: bytes) -> bytes:
    cells = [str(draw.randint(0, 1)), str(draw.randint(-9, 999)), f"{draw.random():.4f}"]
    cells += ["" if draw.random() < 0.1 else f"{name}{draw.randint(0, 40)}" for name in ("ü", "b", "c-")]
    return delimiter.join(cell.encode() for cell in cells)


def mutate(line: bytes, draw: random.Random, delimiter: bytes) -> bytes:
    at = draw.randint(0, len(line) - 1)
    kinds = [
        lambda: line[:at] + bytes([line[at] ^ (1 << draw.randint(0, 7))]) + line[at + 1 :],
        lambda: line[:at] + bytes([draw.randint(0, 255)]) + line[at:],
        lambda: line[:at] + line[at + 1 :],
        lambda: line.replace(delimiter, b"", 1),
        lambda: line[:at] + delimiter * draw.randint(1, 3) + line[at:],
        lambda: line[:at] + b'"' + line[at:],
        lambda: line[:at] + b'""' + line[at:] + b'"',
        lambda: line[:at] + b"\0" + line[at:],
        lambda: line[:at] + b"\xff\xfe" + line[at:],
        lambda: line[:at] + b"\r" + line[at:],
        lambda: line + b"\r",
        lambda: b"\xef\xbb\xbf" + line,
        lambda: line[:at] + b"z" * draw.choice([300, 20_000, 200_000]) + line[at:],
        lambda: line[:at],
        lambda: line[:at] + b"\n" + line[at:],
        lambda: delimiter.join([b"nan", *line.split(delimiter)[1:]]),
        lambda: delimiter.join(
            [line.split(delimiter)[0], draw.choice([b"inf", b"1e99", b"0x1F", b" 7", b"-"]), *line.split(delimiter)[2:]]
        ),
        lambda: b'"' + delimiter.join(line.split(delimiter)[:2]) + b'"' + delimiter + line,
    ]
    return draw.choice(kinds)()


def cells_of(line: str, delimiter: str, quoted: bool) -> list[str]:
    """RFC 4180 for one line, character by character; a parser of its own, not Python's and not pyarrow's."""
    if not quoted:
        return line.split(delimiter)
    cells, cell, inside, begun = [], "", False, False
    i = 0
    while i < len(line):
        char = line[i]
        if inside:
            if char == '"' and line[i + 1 : i + 2] == '"':
                cell, i = cell + '"', i + 1
            elif char == '"':
                inside = False
            else:
                cell += char
        elif char == '"' and not begun:
            inside = begun = True
        elif char == delimiter:
            cells.append(cell)
            cell, begun = "", False
        else:
            cell, begun = cell + char, True
        i += 1
    return [*cells, cell]


def values_of(dataset: Dataset, folder: Path) -> list[tuple[float | str, ...]]:
    """Every prepared row as label, dense values and categorical values, ids looked up in the vocabularies."""
    table = read_split(folder, dataset, "train")
    columns = [table[name].to_pylist() for name in NAMES[:3]]
    for name in NAMES[3:]:
        vocabulary = pq.read_table(folder / "vocabulary" / f"{name}.parquet")["value"].to_pylist()
        columns.append([vocabulary[i - 1] if i else "" for i in table[name].to_pylist()])
    return list(zip(*columns, strict=True))


def expected(cells: list[str]) -> tuple[float | str, ...]:
    numbers = [float(cell or 0) for cell in cells[:3]]
    return (*[0.0 if number != number else float(np.float32(number)) for number in numbers], *cells[3:])


def mutated_source(path: Path, num_mutated: int, delimiter: bytes, seed: int, ending: bytes) -> list[bytes]:
    """Half of the lines are mutated; what the file holds between line feeds."""
    draw = random.Random(seed)
    lines = []
    for _ in range(num_mutated):
        lines += [
            sound_line(draw, delimiter),
            sound_line(draw, delimiter),
            mutate(sound_line(draw, delimiter), draw, delimiter),
        ]
    header = delimiter.join(name.encode() for name in NAMES)
    text = ending.join([header, *lines]) + draw.choice([b"", b"\n"])
    path.write_bytes(text)
    return text.removesuffix(b"\n").split(b"\n")[1:]


def check_text(folder: Path, form: str, num_mutated: int, seed: int) -> tuple[int, int]:
    """(accepted, quarantined) lines, after every accepted one was compared with a parser of its own."""
    delimiter, ending = (b"\t", b"\n") if form == "tsv" else (b",", b"\r\n" if seed % 2 else b"\n")
    folder.mkdir()
    lines = mutated_source(folder / f"rows.{form}", num_mutated, delimiter, seed, ending)
    dataset = run_prepare(
        str(folder / f"rows.{form}"),
        folder / "ds",
        format=form,
        columns=COLUMNS,
        split=NO_SPLIT,
        dense_transform="none",
        max_quarantined_fraction=1.0,
    )
    entries = [json.loads(line) for line in (folder / "ds" / "quarantine.jsonl").read_text().splitlines()]
    bad = {entry["line"] - 2 for entry in entries}  # the header is line 1
    assert len(bad) == len(entries) == dataset.quarantined_rows
    assert dataset.accepted_rows + dataset.quarantined_rows == dataset.source_rows == len(lines)
    kept = [line.removesuffix(b"\r").decode() for i, line in enumerate(lines) if i not in bad]
    for line, found in zip(kept, values_of(dataset, folder / "ds"), strict=True):
        cells = cells_of(line, delimiter.decode(), form == "csv")
        assert len(cells) == len(NAMES), line
        assert expected(cells) == pytest.approx(found), line
    return dataset.accepted_rows, dataset.quarantined_rows


def text_array(values: list[bytes | None]) -> pa.Array:
    """Text that nobody has checked, as other writers leave it in Parquet files."""
    return pa.array(values, pa.binary()).view(pa.string())


def check_parquet(folder: Path, num_mutated: int, seed: int) -> tuple[int, int]:
    draw = random.Random(seed)
    folder.mkdir()
    bad_values = {
        "y": [2.0, -1.0, None, float("nan")],
        "x0": [float("inf"), 1e300],
        "x1": [float("-inf"), -1e39],
        "a": [b"\xff", b"ok\xc3"],
        "b": [b"\x80abc"],
        "c": [b"\xed\xa0\x80"],
    }
    harmless = {"a": [b"", None, b"\0", "ü".encode(), b"x" * 70_000], "x0": [None, float("nan")], "x1": [-0.0]}
    columns: dict[str, list[object]] = {name: [] for name in NAMES}
    bad = set()
    for row in range(3 * num_mutated):
        values: dict[str, object] = {
            "y": float(draw.randint(0, 1)),
            "x0": float(draw.randint(-9, 999)),
            "x1": draw.random(),
        }
        values |= {name: f"{name}{draw.randint(0, 40)}".encode() for name in NAMES[3:]}
        if row % 3 == 2:
            kinds = bad_values if draw.random() < 0.7 else harmless
            name = draw.choice(sorted(kinds))
            values[name] = draw.choice(kinds[name])
            bad |= {row} if kinds is bad_values else set()
        for name in NAMES:
            columns[name].append(values[name])
    arrays = [pa.array(columns[name], pa.float64()) for name in NAMES[:3]]
    arrays += [text_array(columns["a"]), pa.array(columns["b"], pa.binary()), text_array(columns["c"])]
    pq.write_table(pa.table(arrays, names=NAMES), folder / "rows.parquet", row_group_size=700)
    dataset = run_prepare(
        str(folder / "rows.parquet"),
        folder / "ds",
        format="parquet",
        columns=COLUMNS,
        split=NO_SPLIT,
        dense_transform="none",
        max_quarantined_fraction=1.0,
    )
    entries = [json.loads(line) for line in (folder / "ds" / "quarantine.jsonl").read_text().splitlines()]
    assert {entry["line"] - 1 for entry in entries} == bad
    assert dataset.accepted_rows + dataset.quarantined_rows == dataset.source_rows == 3 * num_mutated
    kept = [row for row in range(3 * num_mutated) if row not in bad]
    for row, found in zip(kept, values_of(dataset, folder / "ds"), strict=True):
        numbers = [columns[name][row] for name in NAMES[:3]]
        texts = [(columns[name][row] or b"").decode() for name in NAMES[3:]]
        assert expected(["" if n is None else repr(n) for n in numbers] + texts) == pytest.approx(found)
    return dataset.accepted_rows, dataset.quarantined_rows


@pytest.mark.parametrize("form", ["tsv", "csv", "parquet"])
@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.campaign)])
def test_mutated_rows_shift_no_column(tmp_path: Path, form: str, count: int, fault: FaultRecorder) -> None:
    accepted = quarantined = 0
    for part in range(2):  # the second CSV has Windows' line ends
        if form == "parquet":
            numbers = check_parquet(tmp_path / str(part), count // 2, FIRST_SEED + part)
        else:
            numbers = check_text(tmp_path / str(part), form, count // 2, FIRST_SEED + part)
        accepted, quarantined = accepted + numbers[0], quarantined + numbers[1]
    assert accepted > count and quarantined > count // 5, "most rows are sound, and the mutations are not lost"
    figure = f"{form}: 0 crashes, 0 shifted columns, {accepted:,} rows accepted + {quarantined:,} quarantined = input"
    fault(15, figure, count=count, seed=FIRST_SEED)
