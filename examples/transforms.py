"""Declare columns made of others once, for training and for serving:  python -m examples.transforms [folder]

The rows bring a time, a price and a country; the model reads the hour, the price in four quantiles, and country by hour. The
declaration is in the artifact: what is scored are raw rows again.
"""

import csv
import random
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

TRANSFORMS = (
    "{hour: {kind: hour, column: time}, price_band: {kind: bucketise, column: price, quantiles: 4}, "
    "place: {kind: lower, column: country}, place_hour: {kind: cross, columns: [place, hour]}}"
)


def write_rows(path: Path, count: int = 4000) -> None:
    draw, begin = random.Random(0), datetime(2026, 1, 1)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["click", "time", "price", "country"])
        for _ in range(count):
            time, country = begin + timedelta(minutes=draw.randrange(60 * 24 * 30)), draw.choice(["De", "FR", "us"])
            evening = time.hour >= 18
            click = draw.random() < (0.7 if evening == (country == "us") else 0.2)
            writer.writerow([int(click), time.isoformat(), f"{draw.expovariate(0.1):.2f}", country])


def run(verb: str, *words: str) -> None:
    subprocess.run([sys.executable, "-m", "pipeline", verb, *words], check=True)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "rows.csv")
    words = ["data.name=visits", "data.format=csv", "data.columns.label=click", "data.columns.dense=[price]",
             f"data.transforms={TRANSFORMS}"]  # fmt: skip
    run("prepare", *words, f"source={folder}/rows.csv", f"data.path={folder}/prepared")
    run("train", "data.name=visits", f"data.path={folder}/prepared", f"run_dir={folder}/run", "model=deepfm",
        "trainer.epochs=5", "trainer.global_batch_size=256", "optimizer=adam")  # fmt: skip
    run("export", f"run={folder}/run", f"output={folder}/artifact")
    run("predict", f"artifact={folder}/artifact", f"source={folder}/rows.csv", f"output={folder}/scores.parquet")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/transforms"))
