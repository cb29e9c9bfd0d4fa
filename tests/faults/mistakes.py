"""Make seeded mistakes in valid jobs and tell what the command line does with each, as JSON lines; without torch.

python -m tests.faults.mistakes SEED COUNT DATA FOLDER
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

import yaml

from pipeline.cli.command_line import load_config, parse_command_line, validate_train
from pipeline.config.jobs.train import TrainJob
from tests.support.typos import wrong_choice, wrong_group, wrong_key, wrong_option

# A value that its key cannot have: out of range, of another type, or at odds with another key.
BAD_VALUES = [
    "trainer.global_batch_size=0", "trainer.global_batch_size=many", "trainer.global_batch_size=250", "trainer.epochs=-1",
    "trainer.seed=-3", "trainer.max_steps=0", "trainer.precision=fp8", "trainer.gradient_clip_norm=nan",
    "trainer.gradient_accumulation_steps=3", "trainer.grace_s=1", "trainer.hang_timeout_s=-1", "trainer.hang_timeout_s=soon",
    "optimizer.sparse.lr=0", "optimizer.sparse.lr=-.inf", "optimizer.dense.beta1=1.0", "checkpoint.keep_last_n=0",
    "schedule.dense.kind=poly", "comms.timeout_s=0", "data.path=/nowhere/at/all", "data.reader.num_streams=0", "world_size=3",
    "tables.cat_3.embedding_dim=0", "tables.cat_99.embedding_dim=8", "tables.cat_3.pooling=median", "run_dir=''", "name=",
    "model.over_arch_layer_sizes=[]", "model.dense_arch_layer_sizes=[8,4]", "planner.kind=file planner.plan_file=/no/plan",
    "trainer={", "tables.cat_3=7", "trainer.early_stop.patience=[1]", "=3", "trainer.seed",
    "s3.key=1", "run_dir=gs://bucket/run", "data.path=s3://me:secret12@bucket/data",
]  # fmt: skip


def bad_value(chance: random.Random) -> list[str]:
    return chance.choice(BAD_VALUES).split(" ")


def broken_yaml(chance: random.Random, folder: Path) -> list[str]:
    """An experiment file of the user's own with a mistake in it."""
    values = {"defaults": [{"override /data": "quickstart"}], "trainer": {"seed": 3, "epochs": 2}}
    text = "# @package _global_\n" + yaml.safe_dump(values)
    mistakes: list[Callable[[str], str]] = [
        lambda text: text.replace("seed: 3", "seed: [3"),
        lambda text: text.replace("seed: 3", "sede: 3"),
        lambda text: text.replace("epochs: 2", "epochs: two"),
        lambda text: text.replace("quickstart", "quickstrat"),
        lambda text: text.replace("trainer:", "trainer: 4\ntrainer:"),
        lambda text: text + "\t- odd\n",
    ]
    number = chance.randrange(10**6)
    (folder / "experiment").mkdir(parents=True, exist_ok=True)
    (folder / "experiment" / f"mine{number}.yaml").write_text(chance.choice(mistakes)(text))
    return [f"--config-dir={folder}", f"experiment=mine{number}"]


def tell(argv: list[str]) -> dict[str, object]:
    err, code = io.StringIO(), None
    with contextlib.redirect_stderr(err):
        try:
            parse_command_line(TrainJob, "", argv, validate_train)
        except SystemExit as stop:
            code = stop.code
        except Exception as error:
            code = repr(error)
    return {"argv": argv, "code": code, "told": err.getvalue()}


def main_(seed: int, count: int, data: str, folder: Path) -> None:
    chance = random.Random(seed)
    valid = ["experiment=quickstart", f"data.path={data}", f"run_dir={folder}/run", "hardware=cpu"]
    load_config(TrainJob, valid)  # it is the mistake that is refused
    misspellings = [wrong_key, wrong_group, wrong_option, wrong_choice]
    for number in range(count):
        kind = number % 5
        if kind in (0, 1):
            words = [chance.choice(misspellings)(chance)[0]]
        else:
            words = broken_yaml(chance, folder / "conf") if kind == 4 else bad_value(chance)
        rest = [word for word in valid if kind != 4 or not word.startswith("experiment")]
        print(json.dumps(tell([*rest, *words])))
    print(json.dumps({"torch": "torch" in sys.modules, "valid": tell([*valid, "--cfg"])["code"]}))


if __name__ == "__main__":
    main_(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
