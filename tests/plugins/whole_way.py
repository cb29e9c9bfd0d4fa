"""Go the whole way with the sample plugin in one process, as five commands would, and print what came of it as JSON.

python -m tests.plugins.whole_way FOLDER
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.__main__ import main as run_verb
from pipeline.cli.command_line import load_config
from pipeline.config.columns import LabelConfig
from pipeline.config.jobs.evaluate import EvaluateJob, ExportJob, PredictJob
from pipeline.config.jobs.prepare import PrepareJob
from pipeline.config.jobs.train import TrainJob
from pipeline.config.serving import RetrievalConfig
from pipeline.data.prepare.run import prepare
from pipeline.extras.retrieval.index import index_class
from pipeline.serving.artifact.export import export
from pipeline.serving.scoring.predict import predict
from pipeline.training.evaluate import evaluate
from pipeline.training.train import train

PLUGIN = "plugins=[tests.plugins.sample_plugin]"
ROWS = 4000
DATA = """
name: shop
format: json_rows
dense_transform: none
columns: {label: click, dense: [price], sparse: [shop, item], multi_hot: [tags]}
transforms: {last_digit: {kind: last_characters, column: item}}
"""
TRAIN = [
    "data=shop", "model=summed_mlp", "model.hidden=8", "tables.default.embedding_dim=8", "hardware=cpu",
    "optimizer.dense.name=signed_momentum", "trainer.hooks=[step_counter]", "trainer.metrics=[accuracy_at_30]", "logger.tracker=text_file", "tables.item.compression={kind: modulo, num_rows: 7}",
    "trainer.global_batch_size=128", "trainer.log_every_steps=5", "checkpoint=at_end",
]  # fmt: skip


def write_rows(path: Path) -> None:
    """Shops differ in their rate of clicks; three lines are no rows."""
    random = np.random.default_rng(0)
    shops, items = random.integers(0, 5, ROWS), random.integers(0, 40, ROWS)
    clicks = random.random(ROWS) < 0.1 + 0.15 * shops
    with path.open("w") as file:
        for number in range(ROWS):
            row = {
                "click": int(clicks[number]),
                "price": float(items[number]) / 40,
                "shop": f"s{shops[number]}",
                "item": int(items[number]),
                "tags": ["a", "b", "c"][: number % 4],
            }
            file.write(json.dumps(row) + "\n")
            if number in (7, 70, 700):
                file.write('{"click": "maybe"}\n' if number == 7 else "no row\n")


def search_items(folder: Path) -> dict[str, Any]:
    """The plugin's index, written and read again, beside the package's exact one."""
    random = np.random.default_rng(1)
    items, users = random.normal(size=(50, 8)).astype(np.float32), random.normal(size=(4, 8)).astype(np.float32)
    kind, path = index_class("sorted_scores"), str(folder / "items.index")
    kind.build(items, RetrievalConfig()).write(path)
    found, exact = (
        index.search(users, 5)[1].tolist()
        for index in (kind.load(path, 50, 8, 0), index_class("exact").build(items, RetrievalConfig()))
    )
    return {"found": found, "exact": exact}


def whole_way(folder: Path) -> dict[str, Any]:
    (folder / "conf" / "data").mkdir(parents=True)
    (folder / "conf" / "data" / "shop.yaml").write_text(DATA)
    source, data, run = folder / "rows.jsonrows", folder / "prepared", folder / "run"
    write_rows(source)

    def job(kind: type, *overrides: str) -> Any:
        return load_config(kind, [f"--config-dir={folder / 'conf'}", PLUGIN, *overrides])

    prepared = prepare(job(PrepareJob, "data=shop", f"source={source}", f"data.path={data}"))
    training = [*TRAIN, f"data.path={data}", f"run_dir={run}"]
    first = train(job(TrainJob, *training, "trainer.max_steps=10"))
    second = train(job(TrainJob, *training, "trainer.max_steps=20"))
    measured = evaluate(job(EvaluateJob, f"run={run}"))
    exported = export(
        job(
            ExportJob,
            f"run={run}",
            "parity.max_ne_increase=1",
            "parity.max_auc_decrease=1",
            "parity.max_score_difference=1",
        )
    )
    predict(job(PredictJob, f"artifact={exported.artifact}", f"source={source}", f"output={folder / 'scores.csv'}"))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run_verb(["count_lines", PLUGIN, f"source={source}"])
    return {
        "prepared": prepared.path,
        "summary": (run / "summary.json").read_text(),
        "config": (run / "config.yaml").read_text(),
        "steps": [first.step, second.step],
        "metrics": measured.metrics,
        "tracked": (run / "tracked.txt").read_text(),
        "parity": exported.parity,
        "printed": printed.getvalue(),
        "loss": LabelConfig("regression", loss={"kind": "absolute"}).read_loss()(3.0, 5.0),
        "items": search_items(folder),
        "scores": (folder / "scores.csv").read_text(),
        "log": (run / "metrics.jsonl").read_text(),
    }


if __name__ == "__main__":
    json.dump(whole_way(Path(sys.argv[1])), sys.stdout)
