"""Misspell real commands and print what the user is told, as JSON lines; a process of its own, for it must not import torch.

`python -m tests.support.typos SEED COUNT`
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
from collections.abc import Callable

from pipeline.cli.command_line import load_config
from pipeline.cli.compose import config_folders, group_options
from pipeline.config.jobs.train import TrainJob
from pipeline.config.optimizers import layer_optimizers, table_optimizers
from pipeline.config.training import COMM_PRECISIONS, SCHEDULES, TRAIN_PIPELINES

KEYS = [
    "trainer.global_batch_size=64", "trainer.max_steps=9", "trainer.gradient_clip_norm=1.0", "trainer.early_stop.patience=3",
    "optimizer.sparse.momentum=0.9", "optimizer.dense.weight_decay=0.1", "schedule.dense.warmup_steps=10",
    "comms.timeout_s=60", "checkpoint.keep_last_n=3", "planner.timeout_s=5", "hardware.ranks_per_host=8",
    "data.reader.num_streams=32", "data.ids.min_frequency=2", "data.feature_ids.cat_2.hash_size=9", "run_dir=elsewhere",
    "tables.cat_3.embedding_dim=8", "tables.cat_3.init.scale=0.1", "tables.default.sharding.min_partition=4",
    "model.over_arch_layer_sizes=[8,1]", "data.synthetic.num_rows=10", "world_size=2",
]  # fmt: skip
CHOICES = {
    "optimizer.sparse.name": table_optimizers(),
    "optimizer.dense.name": layer_optimizers(),
    "schedule.sparse.kind": SCHEDULES,
    "comms.backward_precision": COMM_PRECISIONS,
    "trainer.pipeline": TRAIN_PIPELINES,
}


def misspell(word: str, chance: random.Random, taken: set[str]) -> str:
    """One slip of the finger inside a word that gives none of `taken`."""
    while True:
        at = chance.randrange(len(word) - 1)
        letter = chance.choice("abcdefghijklmnopqrstuvwxyz")
        slips = [
            word[:at] + word[at + 1 :],
            word[:at] + word[at] + word[at:],
            word[:at] + word[at + 1] + word[at] + word[at + 2 :],
            word[: at + 1] + letter + word[at + 2 :],
        ]
        wrong = chance.choice(slips)
        if wrong not in taken and not wrong.isdigit():
            return wrong


def wrong_key(chance: random.Random) -> tuple[str, str]:
    """A misspelt part of a key; the names of tables and features are the user's own."""
    key, _, value = chance.choice(KEYS).partition("=")
    parts = key.split(".")
    at = chance.choice([index for index, part in enumerate(parts) if part != "default" and not part.startswith("cat_")])
    right = ".".join(parts[: at + 1])
    parts[at] = misspell(parts[at], chance, {parts[at]})
    return f"{'.'.join(parts)}={value}", right


def train_groups() -> dict[str, list[str]]:
    """The groups of a train job; other verbs have some of their own."""
    fields = {field.name for field in dataclasses.fields(TrainJob)} | {"experiment", "early_stop", "debug"}
    return {group: options for group, options in group_options(config_folders()).items() if group in fields}


def wrong_group(chance: random.Random) -> tuple[str, str]:
    groups = train_groups()
    group = chance.choice(sorted(groups))
    return f"{misspell(group, chance, set(groups))}={groups[group][0]}", group


def wrong_option(chance: random.Random) -> tuple[str, str]:
    """Of two long names: in `fp16` a slip is as near to `bf16`."""
    groups = train_groups()
    group = chance.choice(sorted(groups))
    options = [option for option in groups[group] if len(option) > 4]
    if not options:
        return wrong_option(chance)
    option = chance.choice(options)
    return f"{group}={misspell(option, chance, set(groups[group]))}", option


def wrong_choice(chance: random.Random) -> tuple[str, str]:
    key = chance.choice(sorted(CHOICES))
    right = chance.choice([choice for choice in CHOICES[key] if len(choice) > 4] or list(CHOICES[key]))
    return f"{key}={misspell(right, chance, set(CHOICES[key]))}", right


def main(seed: int, count: int) -> None:
    chance = random.Random(seed)
    kinds: list[Callable[[random.Random], tuple[str, str]]] = [
        wrong_key,
        wrong_key,
        wrong_group,
        wrong_option,
        wrong_choice,
    ]
    for number in range(count):
        override, right = kinds[number % len(kinds)](chance)
        told = ""
        try:
            load_config(TrainJob, ["data=quickstart", override])
        except ValueError as error:
            told = str(error)
        print(json.dumps({"override": override, "right": right, "told": told}))
    print(json.dumps({"torch": "torch" in sys.modules}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
