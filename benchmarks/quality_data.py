"""Make a data folder of benchmarks.quality from a public data set's files:

    python -m benchmarks.quality_data criteo FOLDER train.txt
    python -m benchmarks.quality_data frappe FOLDER frappe.validation.libfm frappe.test.libfm
    python -m benchmarks.quality_data ml100k FOLDER ml-100k.inter ml-100k.user ml-100k.item
    python -m benchmarks.quality_data sequences FOLDER Beauty.txt Beauty_item2attributes.json

The files are those of Criteo Kaggle; of github.com/hexiangnan/neural_factorization_machine (whose training file has the
same rows thrice as many); of MovieLens 100k as RecBole ships it; and of github.com/RUCAIBox/CIKM2020-S3Rec. A folder has
train.csv, valid.csv, test.csv with a header, and spec.json. ml100k also writes FOLDER_histories, with the user's last clicks.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Row = Sequence[Any]
SEED = 2026
MAX_USERS = 5000  # of a file of sequences
HISTORY = 20  # of the newest items before a row


def write(folder: Path, header: Sequence[str], splits: dict[str, list[Row]], spec: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in splits.items():
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(header)
            writer.writerows(rows)
    (folder / "spec.json").write_text(json.dumps({"name": folder.name, **spec}, indent=1) + "\n")


def split(rows: list[Row], parts: Sequence[int]) -> dict[str, list[Row]]:
    """Train, valid and test of shuffled rows, in the proportions of `parts`."""
    rows, ends = list(rows), [0]
    random.Random(SEED).shuffle(rows)
    for part in parts:
        ends.append(ends[-1] + part)
    cuts = [len(rows) * end // ends[-1] for end in ends]
    return {
        name: rows[begin:end] for name, begin, end in zip(("train", "valid", "test"), cuts[:-1], cuts[1:], strict=True)
    }


def make_criteo(folder: Path, raw: Path) -> None:
    """Rows of train.txt at random 7:1:2; an integer x > 2 as floor(log(x)^2), as the winners of 2014 and Criteo_x4 have it."""
    names = [*(f"I{number}" for number in range(1, 14)), *(f"C{number}" for number in range(1, 27))]
    rows: list[Row] = []
    for line in raw.read_text(encoding="utf-8").splitlines():
        label, *values = line.split("\t")
        integers = [math.floor(math.log(int(x)) ** 2) if x and int(x) > 2 else x for x in values[:13]]
        rows.append([label, *(value if value != "" else "missing" for value in [*integers, *values[13:]])])
    spec = {"label": "label", "categorical": names, "min_count": 2, "batch_size": 256}
    write(folder, ["label", *names], split(rows, (7, 1, 2)), spec)


def make_frappe(folder: Path, *raw: Path) -> None:
    """Rows at random 4:1:1. Each has a label of 1 or -1, and one id for each of ten features."""
    names = ["user", "item", "daytime", "weekday", "weekend", "homework", "cost", "weather", "country", "city"]
    rows: list[Row] = []
    for line in (line for path in raw for line in path.read_text().splitlines()):
        label, *ids = line.split()
        rows.append([int(label == "1"), *(one.split(":")[0] for one in ids)])
    write(folder, ["click", *names], split(rows, (4, 1, 1)), {"categorical": names})


def make_ml100k(folder: Path, ratings: Path, users: Path, items: Path) -> None:
    """Rows at random 8:1:1; a rating of 4 or 5 is a click. The history has the user's 50 clicks before a row."""
    user_of, item_of = ({row[0]: row for row in _table(path)} for path in (users, items))
    clicked: dict[str, list[str]] = defaultdict(list)
    rows: list[Row] = []
    for user, item, stars, _ in sorted(_table(ratings), key=lambda row: (float(row[3]), int(row[0]), int(row[1]))):
        _, _, year, genres = item_of[item]
        click = float(stars) >= 4
        rows.append([int(click), *user_of[user], item, year, genres.replace(" ", "|"), "|".join(clicked[user][-50:])])
        if click:
            clicked[user].append(item)
    names = ["user_id", "age", "gender", "occupation", "zip_code", "item_id", "release_year"]
    spec = {"categorical": names, "sequences": ["genres"]}
    splits = split(rows, (8, 1, 1))
    write(folder, ["click", *names, "genres", "history"], splits, spec)
    histories = {"histories": {"history": {"target": "item_id", "length": 50}}}
    other = folder.with_name(f"{folder.name}_histories")
    write(other, ["click", *names, "genres", "history"], splits, {**spec, **histories})


def _table(path: Path) -> list[list[str]]:
    return [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()[1:]]


def make_sequences(folder: Path, raw: Path, attributes: Path) -> None:
    """The first users' items, each with one at random that the user does not have; the last item tests, the one before validates."""
    of_item = json.loads(attributes.read_text())
    lines = [line.split() for line in raw.read_text().splitlines()]
    items = sorted({item for _, *sequence in lines for item in sequence})
    generator = random.Random(SEED)
    splits: dict[str, list[Row]] = {"train": [], "valid": [], "test": []}
    for user, *sequence in lines[:MAX_USERS]:
        mine = set(sequence)
        for place, item in enumerate(sequence):
            other = next(one for one in iter(lambda: generator.choice(items), None) if one not in mine)
            name = {len(sequence) - 1: "test", len(sequence) - 2: "valid"}.get(place, "train")
            history = "|".join(sequence[max(0, place - HISTORY) : place])
            for label, one in ((1, item), (0, other)):
                categories = "|".join(str(number) for number in of_item.get(one, [0])[:6])
                splits[name].append([label, user, one, categories, history])
    random.Random(SEED).shuffle(splits["train"])
    spec = {
        "categorical": ["user", "item"],
        "sequences": ["categories"],
        "histories": {"history": {"target": "item", "length": HISTORY}},
    }
    write(folder, ["click", "user", "item", "categories", "history"], splits, spec)


MAKERS: dict[str, Callable[..., None]] = {
    "criteo": make_criteo,
    "frappe": make_frappe,
    "ml100k": make_ml100k,
    "sequences": make_sequences,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=list(MAKERS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    arguments = parser.parse_args()
    MAKERS[arguments.kind](arguments.folder, *arguments.files)


if __name__ == "__main__":
    main()
