"""Train DIN on users' histories of your own rows:  python -m examples.sequences [folder]

Each row has a target item and what the user clicked before, oldest first. A click goes by whether the target's kind is in the history.
"""

import csv
import random
import subprocess
import sys
from pathlib import Path


def write_rows(path: Path, count: int = 6000) -> None:
    draw = random.Random(0)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["click", "item", "kind", "history", "history_kind"])
        for _ in range(count):
            item, history = draw.randrange(100), [draw.randrange(100) for _ in range(draw.randrange(8))]
            kinds = [past % 10 for past in history]
            click = draw.random() < (0.8 if item % 10 in kinds else 0.2)
            past = "|".join(f"i{each}" for each in history)
            writer.writerow([int(click), f"i{item}", f"k{item % 10}", past, "|".join(f"k{kind}" for kind in kinds)])


def run(verb: str, *words: str) -> None:
    subprocess.run([sys.executable, "-m", "pipeline", verb, *words], check=True)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "rows.csv")
    # A history's ids are the target's, in one vocabulary and one table; its kinds stand beside it, position by position.
    sequences = "{history: {max_length: 20, shares: item}, history_kind: {beside: history, shares: kind}}"
    columns = ["data.columns.label=click", "data.columns.sparse=[item,kind]", f"data.columns.sequence={sequences}"]
    run(
        "prepare",
        "data.name=clicks",
        "data.format=csv",
        *columns,
        f"source={folder}/rows.csv",
        f"data.path={folder}/prepared",
    )
    run("train", "data.name=clicks", f"data.path={folder}/prepared", f"run_dir={folder}/run", "model=din",
        "model.sequences=[history,history_kind]", "model.targets=[item,kind]", "trainer.epochs=6",
        "trainer.global_batch_size=128", "optimizer=adam", "optimizer.sparse.lr=0.01", "optimizer.dense.lr=0.003")  # fmt: skip
    run("evaluate", f"run={folder}/run", "split=test")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/sequences"))
