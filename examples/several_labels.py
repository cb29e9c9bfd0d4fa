"""Train two labels on your own rows, and score both by name:  python -m examples.several_labels [folder]

Impressions with a click, and a conversion that counts where there was a click. MMoE learns both; `predict` writes a column a label.
"""

import csv
import random
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq


def write_rows(path: Path, count: int = 4000) -> None:
    draw = random.Random(0)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["click", "bought", "user", "item", "price"])
        for _ in range(count):
            user, item = draw.randrange(50), draw.randrange(40)
            click = draw.random() < 0.2 + 0.5 * (user % 5 == item % 5)
            bought = click and draw.random() < 0.1 + 0.6 * (item % 2)
            writer.writerow([int(click), int(bought), f"u{user}", f"i{item}", draw.randrange(1, 100)])


def run(verb: str, *words: str) -> None:
    subprocess.run([sys.executable, "-m", "pipeline", verb, *words], check=True)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "rows.csv")
    labels = "{click: {kind: binary}, bought: {kind: binary, mask: click}}"
    shop = [
        "data.name=shop",
        "data.format=csv",
        "data.columns.label=click",
        f"data.columns.labels={labels}",
        f"data.path={folder}/prepared",
    ]
    columns = ["data.columns.sparse=[user,item]", "data.columns.dense=[price]"]
    run("prepare", *shop, *columns, f"source={folder}/rows.csv")
    run("train", *shop, f"run_dir={folder}/run", "model=mmoe", "trainer.epochs=6", "trainer.global_batch_size=128",
        "optimizer=adam", "optimizer.sparse.lr=0.01")  # fmt: skip
    run("export", f"run={folder}/run", f"output={folder}/artifact")
    run("predict", f"artifact={folder}/artifact", f"source={folder}/rows.csv", f"output={folder}/scores.parquet")
    print(pq.read_table(folder / "scores.parquet").slice(0, 3).to_pylist())


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/several_labels"))
