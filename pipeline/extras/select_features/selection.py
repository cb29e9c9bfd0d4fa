"""Measure importance, train without the least important features, and compare."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from pipeline.config.jobs.evaluate import EvaluateJob
from pipeline.config.jobs.train import TrainJob
from pipeline.data.dataset import load_dataset
from pipeline.devices.process_group import init_for
from pipeline.extras.runs.again import job_of_run
from pipeline.extras.runs.compare import compare
from pipeline.extras.runs.folder import open_run
from pipeline.extras.select_features.config import SelectFeaturesJob
from pipeline.extras.select_features.subset import data_without, needed_features, tables_without, write_subset
from pipeline.planner.explain import print_grid
from pipeline.runtime.errors import ConfigError
from pipeline.runtime.logs import to_json
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.runtime.storage import storage
from pipeline.training.evaluate import evaluate
from pipeline.training.readers import on_all_ranks
from pipeline.training.train import train

SPLIT = "validation"  # of the importance; the comparison is on test, whose rows chose nothing
CHOICE = "selection.json"
Choice = dict[str, dict[str, Any]]  # feature -> ne_increase, error, dropped, note


def select_features(job: SelectFeaturesJob) -> str:
    """Select the features, train and compare. Return the text for the terminal. Collective. Raises
    ConfigError if no feature can be left out.
    """
    trained = replace(job_of_run(job.run), world_size=job.world_size)
    context, dataset = init_for(trained), load_dataset(trained.data.path)
    choice = _chosen(job, needed_features(trained, dataset), context)
    dropped = {name for name, entry in choice.items() if entry["dropped"]}
    reduced = replace(
        trained,
        data=data_without(trained.data, dropped, storage.join(job.folder, "data")),
        tables=tables_without(trained.tables, dropped),
    )
    on_all_ranks(lambda: write_subset(trained.data.path, dataset, reduced.data) if context.is_main else None, context)
    seed, baseline, selected = trained.trainer.seed, [job.run], []
    for number in range(seed, seed + job.seeds):
        selected.append(_train(reduced, number, storage.join(job.folder, f"selected_seed_{number}")))
        if number > seed:
            baseline.append(_train(trained, number, storage.join(job.folder, f"all_seed_{number}")))
    split = "test" if dataset.splits["test"].num_rows else SPLIT
    for run in (*baseline, *selected):
        evaluate(EvaluateJob(run=run, split=split, world_size=job.world_size))
    if not context.is_main:
        return ""
    compared = compare([open_run(path) for path in (*baseline, *selected)], split, job.confidence)
    rows = [
        [name, f"{entry['ne_increase']:z.5f} ± {2 * entry['error']:.5f}", entry["note"]]
        for name, entry in choice.items()
    ]
    folder = (
        f"{selected[0]}/config.yaml has the columns for prepare; the data set of these runs is in {reduced.data.path}"
    )
    return "\n\n".join(
        [print_grid(("feature", "NE rises", ""), rows, right=("NE rises",)), compared.as_text(), f"next      {folder}"]
    )


def _chosen(job: SelectFeaturesJob, needed: set[str], context: DistributedContext) -> Choice:
    """Return the choice that an earlier call of the same command has stored, or make and store it. Collective."""
    path = storage.join(job.folder, CHOICE)
    asked = {"run": job.run, "drop": job.drop, "rows": job.rows}

    def read() -> Choice | None:
        saved: dict[str, Any] = {"asked": asked, "features": None}
        if storage.is_file(path):
            saved = json.loads(storage.read_text(path))
        if saved["asked"] != asked:
            raise ConfigError(f"{path} is of another selection, {saved['asked']}: choose another run_dir")
        features: Choice | None = saved["features"]
        return features

    if (found := on_all_ranks(read, context)) is not None:
        return found
    words = EvaluateJob(run=job.run, split=SPLIT, importance_rows=job.rows, max_batches=1, world_size=job.world_size)
    choice = choose(evaluate(words).importance, job.drop, needed)

    def keep() -> None:
        if context.is_main:
            storage.make_folder(job.folder)
            storage.publish_text(path, to_json({"asked": asked, "features": choice}, indent=1))

    on_all_ranks(keep, context)
    return choice


def choose(importance: dict[str, Any], drop: int | None, needed: set[str]) -> Choice:
    """Return the features, the least important first. `needed` features are never left out.

    A feature of several labels counts by the label for which it is most important.
    """
    labels = [importance["features"], *(each["features"] for each in importance.get("others", {}).values())]
    most = {
        name: max((each[name] for each in labels), key=lambda entry: float(entry["ne_increase"]))
        for name in importance["features"]
    }
    ranked = sorted(most, key=lambda name: float(most[name]["ne_increase"]))
    free = [name for name in ranked if name not in needed]
    if drop is not None and drop > len(free):
        raise ConfigError(f"drop={drop}, but only {len(free)} of the {len(ranked)} features can be left out")
    dropped = free[:drop]
    if drop is None:
        dropped = [name for name in free if most[name]["ne_increase"] <= 2 * most[name]["error"]]
    if not dropped:
        raise ConfigError("without any single feature NE rises by more than two standard errors: set drop=<how many>")
    if len(dropped) == len(ranked):
        raise ConfigError(f"all {len(ranked)} features would be left out: set drop=<fewer>")
    notes = {
        name: "left out" if name in dropped else "needed by the model" if name in needed else "" for name in ranked
    }
    return {name: {**most[name], "dropped": name in dropped, "note": notes[name]} for name in ranked}


def _train(job: TrainJob, seed: int, run_dir: str) -> str:
    """Train, or continue a training. Return its folder. Collective."""
    name = run_dir.rpartition("/")[2]
    train(replace(job, name=name, run_dir=run_dir, trainer=replace(job.trainer, seed=seed)))
    return run_dir
