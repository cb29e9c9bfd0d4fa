"""Write docs/measurements/ from the JSON files that benchmarks wrote there:  python docs/write_measurements.py

A benchmark's `--output docs/measurements/NAME.json` writes {"about": {...}, "figures": [{...}, ...]}. Each such file becomes
a page with the command, the machine, the commit and a table. So nobody types a figure.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import gpu_host, growth  # noqa: E402
from tests.faults.report import render as faults_table  # noqa: E402

FOLDER = ROOT / "docs" / "measurements"
WRITTEN = "<!-- written by python docs/write_measurements.py from {} -->"
# Title and what the figures say, by the name of the file. A file that is not listed here gets its name as the title.
PAGES = {
    "canary": (
        "Canary serving",
        "The answers are in-process calls of the server's router, with its real slots, batchers and registry, 64 at a time. The "
        "models are stand-ins whose scores state their version. Canaries and champions were replaced 12 times, deltas were "
        "applied to both models all the time, and one of four canaries failed at every 97th batch. Requests had 1 to 12 rows, "
        "and a batch 8. The evaluations are of generated rows with known probabilities; each planted challenger is judged once for "
        "each draw ([canary](../do/canary.md#judge-it-by-live-labels)).",
    ),
    "step": (
        "Time of a training step",
        "Each preset trains by this package and by TorchRec's documented loop, in turns, in separate processes. "
        "The ratios are to the first side of the preset. If the machine was shared, read the CPU time.",
    ),
    "growth": (
        "How costs grow",
        "Each point is a process. The exponent is the slope between the last two sizes, after the cost of the cheapest "
        "size is subtracted. `flat` means that the cost grew by less than a quarter. "
        "For `save`, `load`, `draw`, `plan` and `step` the memory is the growth of the process.\n\n"
        "![CPU-seconds and memory of each stage](growth.svg)",
    ),
    "gpu_host": (
        "Host time and launches of a GPU step",
        "Two ranks ran this package and TorchRec's documented loop on shadow GPUs, with equal layers, batches and kinds of "
        "sharding. [GPUs](../do/gpu.md#host-time-and-launches) explains the columns.",
    ),
    "gpu_steps": (
        "Steps on an H100",
        "This package and TorchRec's documented loop trained in turns in one process on one GPU; a figure is the median of "
        "three rounds of 30 steps, with the least and the most. Two virtual machines of one kind were used. On the second, the "
        "host was slower, and only the check's line was kept. `times torchrec` compares equal work in equal precision, except for bf16, "
        "which is compared with TorchRec's loop in fp32. `predicted ms` is the planner's prediction for `hardware=h100_80gb`; "
        "nothing in it was fitted to these steps.",
    ),
    "gpu_rates": (
        "Rates of an H100",
        "What the planner takes from data sheets, and FBGEMM's lookups with row-wise Adagrad on 8,192 samples. "
        "The time of a small lookup is the host's.",
    ),
    "user_items": (
        "Scoring 256 items for one user",
        "`full rows` has the user's columns in each row. `tiled` is TorchEasyRec's way: the request has the user once, and the server "
        "repeats the encoded user for each item before tables and layers. `by user` also looks up the user once "
        "([requests](../do/serving.md#the-server)). All three have scores with the same bits. One client asked at one rate for each "
        "model and format, and the ways took turns. Other programs ran on the machine: read the bytes and the server's CPU time "
        "first.",
    ),
    "joins": (
        "Columns that are joined at read",
        "`rows alone` lacks the joined columns, `joined at read` stores them once ([joins](../do/joins.md)), `joined beforehand` repeats them in each "
        "row. The batches of the last two were compared first: all bits are equal. `MB` are the shards and side tables. `items` are 8 "
        "categories and 4 numbers of 5,000 items with 8 versions each; `histories` are 50 items of each of 500 users, with their categories and shops, written 20 times each, so about 20 rows see one version. "
        "Rows were read by one thread. The last two columns compare rows per CPU-second: the median of the rounds, and in parentheses the least and the greatest.",
    ),
    "serving_log": (
        "A server with a serving log",
        "Servers without a log (`off`), with a log of all requests and with a log of a tenth of them took turns. At the end they were killed by "
        "SIGKILL, and `skew` computed the logged rows again: `equal ids` and `equal scores` count the rows with the same bits. Clients and server "
        "shared two cores, and nothing else ran. A separate process writes the log on idle cores. `least` and `most` are of `p99 / off` over the rounds. "
        "p99 changes much between rounds. At 1,000 requests per second and more, every round is slower with a log of all requests. "
        "At 200 and 500, the rounds do not show whether it is. This machine does not answer 2,000 requests per second without a log either.",
    ),
    "next_item": (
        "The next item on public sequences",
        "Amazon Beauty and Toys (5-core), with a line of items for each user. The last item of a user is the test row, the item before it the "
        "validation row. The test item is ranked among all items that occur in training; items of the user's history (the newest 50) are not "
        "ranked, as in S3-Rec's protocol. A test item that does not occur in training is a miss. `retrieved` is measured on the answers of "
        "an artifact to all users (seed 1), without all items of the user. Settings were chosen on validation rows of Beauty. The published "
        "columns are the HR@10 and NDCG@10 that S3-Rec's authors print. `python -m benchmarks.next_item --sources FILE ...` takes the files of "
        "other sets, such as Sports and Yelp.",
    ),
    "negatives": (
        "Negatives of a two-tower",
        "Generated clicks, where an item's probability is about 1 / rank. Ways differ in the negatives of the two-tower and in the "
        "correction of their scores ([negatives](../do/models.md#negatives-from-the-corpus)). Recall and MRR are of clicked test rows, "
        "among all items of the test split: means over seeds. Each way has the better of two temperatures by recall@10 on validation rows of "
        "another seed. `step cpu` is the CPU time of a step, compared with the first way.",
    ),
    "quality": (
        "Quality of the models, compared with FuxiCTR's",
        "Each model was trained here and by FuxiCTR 2.3.10 on the same files: one thread, Adam of all rows at 0.001, vectors of 16, three layers of 64 "
        "without dropout, and without norms except in models with norms, and L2 of tables 0.001 (LR and FM: none). The step with the best validation AUC was measured on the test split. Both sides have FuxiCTR's schedule: a "
        "tenth of the rate after each epoch without improvement, the end after the second in a row (here `early_stop=auc schedule.plateau.patience=1 "
        "trainer.early_stop.patience=2`). A figure is the mean over "
        "seeds, with the standard deviation in parentheses. `standard error` belongs to the difference. AUC is better if "
        "higher, log loss if lower. `criteo` is the first 10,000 rows of Criteo Kaggle, in batches of 256; its test split has 2,000 rows. "
        "`ml100k` is MovieLens 100k, in batches of 1,024; its test split has 10,000 rows. `beauty` and `toys` are items of 5,000 users of Amazon Beauty and Amazon Toys and Games (5-core), each with one that "
        "is drawn at random; the last item of a user is in the test split, which has 10,000 rows. On these two, DLRM learns nothing on both sides, and FuxiCTR's DeepFM and xDeepFM are far below its other models. "
        "FuxiCTR limits the norm of all gradients together to 10. Only MaskNet, FinalNet and WuKong reach this limit: they normalize vectors that start near 0, so "
        "the first gradients are hundreds of times larger than later ones. Here tables update during backward, so these three models have "
        "`optimizer.sparse.gradient_clip_norm=0.1` for each row and `trainer.gradient_clip_norm=10` for the layers. "
        "The rows of FinalNet start with a standard deviation of 0.0001, as in FuxiCTR. "
        "The last column compares the samples that one CPU-second trains; other programs ran on the machine.",
    ),
    "experiments": (
        "Quality of the shipped experiments",
        "The rows are generated, so the best possible AUC is known. Each run is `python -m pipeline train experiment=quickstart trainer.seed=1`, with its experiment and seed, then "
        "`evaluate split=test`. The share of the lift is (AUC - 0.5) / (best possible AUC - 0.5), with its standard deviation over "
        "seeds.",
    ),
    "debiasing": (
        "Propensity weights on random ratings of Coat",
        "Users rated items of their choice (training and validation), and random items (the test). Weights are 1 / propensity, by naive "
        "Bayes over the rating or by the popularity of user and item; test rows have the weight 1. The difference is the mean over "
        "seeds of the difference within a seed, where all ways have the same rows. Each seed has other validation rows and another held-out "
        "twentieth of the random ratings, which gives naive Bayes the share of each rating. Settings were chosen on validation rows "
        "alone. The ranges of weights are of the last seed. Lower `logloss`, `mse` and `mae` are better, and `calibration` is best at 1.",
    ),
    "off_policy": (
        "Intervals of off-policy estimates on generated logs",
        "30 contexts, 20 actions, clicks by a known probability, so the value of each policy is known. The log avoids what users click, "
        "by different degrees, so some weights are heavy. Each draw is a new log. The coverage is the share of draws whose 95 % interval "
        "has the known value. The reward model of the doubly robust and the switch estimate is wrong on purpose. In the last log the "
        "weight that matters is in rows that most draws do not have; `evaluate` then says that the intervals are not reliable.",
    ),
    "open_bandit": (
        "Off-policy estimates on the Open Bandit logs",
        "Six logs of 10,000 rows of one site: a random policy (`random`) and Thompson sampling (`bts`), in three campaigns at the same "
        "time (obp 0.4.1, arXiv 2008.07146). Each line estimates the click rate in percent of one policy from the log of the other. "
        "`own click rate` is the mean of the policy's own log, also with a 95 % interval: with 38 to 69 clicks in a log it is uncertain "
        "too. The files have the propensities. The random policy is known; Thompson sampling is valued by the share of each item at each "
        "position of its log, because the files do not have its probabilities of other items.",
    ),
    "diagnoses": (
        "Diagnoses of planted faults",
        "Each line is a training run. A planted fault is correct if the first finding of `python -m pipeline diagnose` is the planted one, "
        "a healthy run if there is no finding. [My model is bad](../do/diagnose.md) explains the findings.",
    ),
    "faults": (
        "Planted faults",
        "`make faults` plants every fault of `tests/faults` and writes this table. The log of a run that meets one of them "
        "is explained in [reliability](../do/reliability.md).",
    ),
}
BY_HAND = {
    "compression.md": "Quality of compressed tables at equal memory (copied by hand)",
}
NAMES = {
    "cpu": "processor",
    "load": "load at the end",
    "commit": "commit",
    "planted_faults": "planted faults",
    "healthy_runs": "healthy runs",
}


def render() -> dict[str, str]:
    """Return the text of each page by its file name."""
    pages, lines = {}, []
    for file in sorted([*FOLDER.glob("*.json"), *FOLDER.glob("*.jsonl")]):
        title, text = PAGES.get(file.stem, (file.stem, ""))
        about, table = read(file)
        head = "\n".join(f"- {NAMES.get(key, key)}: {_shown(key, value)}" for key, value in about.items())
        parts = [f"# {title}", WRITTEN.format(file.name), text, head, table]
        pages[f"{file.stem}.md"] = "\n\n".join(part for part in parts if part) + "\n"
        lines.append(f"- [{title}]({file.stem}.md): {about.get('date', '')}")
    lines += [f"- [{text}]({name})" for name, text in BY_HAND.items()]
    intro = (
        "Each page is written from the JSON file that a benchmark wrote, with the command, the machine and the commit. "
        "Measure again with `--output docs/measurements/NAME.json`, then run `python docs/write_measurements.py`."
    )
    pages["README.md"] = "\n\n".join(["# Measurements", WRITTEN.format("*.json"), intro, "\n".join(lines)]) + "\n"
    return pages


def read(file: Path) -> tuple[dict[str, Any], str]:
    """Return how a file's figures were measured, and their table in Markdown."""
    if file.suffix == ".jsonl":
        records = [json.loads(line) for line in file.read_text().splitlines()]
        dates = sorted({record["date"] for record in records})
        return {"command": "make faults", "date": " to ".join(dict.fromkeys([dates[0], dates[-1]]))}, faults_table(
            records
        )
    found = json.loads(file.read_text())
    if file.stem == "growth":
        return found["about"], growth.report(growth.read_points(file))
    if file.stem == "gpu_host":
        return found["about"], gpu_host.table(found)
    return found["about"], table_of(found["figures"])


def table_of(figures: list[dict[str, Any]]) -> str:
    """A row a figure, a column a key. Keys that hold lists or records are left out."""
    columns = [key for key, value in figures[0].items() if not isinstance(value, (dict, list))]
    rows = [[_cell(figure[column]) for column in columns] for figure in figures]
    heads = [column.replace("_", " ") for column in columns]
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(columns), *rows])


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _shown(key: str, value: object) -> str:
    return f"`{value}`" if key == "command" else str(value)


if __name__ == "__main__":
    for name, text in render().items():
        (FOLDER / name).write_text(text)
