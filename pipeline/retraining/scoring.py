"""Score a prepared window with a trained model, in an order that is the same for every model.

Both models of a comparison read the window with their vocabularies, in the same files and the same
order, so that their scores match row by row.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.config.jobs.train import TrainJob
from pipeline.config.planner import PlannerConfig
from pipeline.config.registry import from_extra
from pipeline.config.retraining import GateConfig
from pipeline.config.saved_jobs import load_saved_job
from pipeline.data.dataset import load_dataset
from pipeline.data.raw.layout import feature_names
from pipeline.data.read.batch import first_ids
from pipeline.data.read.reader import ShardReader
from pipeline.devices.process_group import init_for
from pipeline.models.tasks.labels import LabelsPrediction, LabelsTask, losses_of
from pipeline.models.tasks.task import task_in
from pipeline.retraining.feature_changes import only_read
from pipeline.retraining.gate import HeldScores, Scores
from pipeline.runtime.errors import RetrainingError
from pipeline.runtime.process import preemption, watchdog
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.training.evaluation import Collector, clicks_of
from pipeline.training.readers import open_reader
from pipeline.training.sharded_model import build_sharded_model, resolve


def score(
    config: str,
    checkpoint: str,
    data_path: str,
    gate: GateConfig,
    world_size: int,
    limits: watchdog.Limits,
    propensity: str | None = None,
) -> Scores:
    """Collective: score each row of the training split of `data_path` once.

    Rank 0 gets the scores, other ranks empty ones.

    Also returns the labels and slices that `gate` names. `config` is a saved job, `checkpoint` the
    folder of a step. `data_path` was prepared with the model's vocabularies. propensity: its column
    for gate.policy.

    Raises:
        RetrainingError: the checkpoint is damaged or does not fit the data.
    """
    saved = load_saved_job(TrainJob, config)
    dataset = load_dataset(data_path)
    columns = saved.data.columns
    if columns.weight != dataset.weight_column:  # both models are compared with the weights of today's job
        columns = replace(columns, weight=dataset.weight_column)
    if gate.policy:
        columns = replace(columns, propensity=propensity)
    job = replace(
        saved,
        world_size=world_size,
        planner=PlannerConfig(gap_tolerance=saved.planner.gap_tolerance),
        data=replace(saved.data, path=data_path, columns=columns, reader=replace(saved.data.reader, shuffle="none")),
    )
    watchdog.use(limits)
    context = init_for(job)
    own = only_read(dataset.with_features(*feature_names(job.data)), job.data)
    resolved = resolve(job, own, context)
    watchdog.beat(phase="loading")
    assembly = build_sharded_model(resolved, context, initialize=False)
    folder, _, step = checkpoint.rstrip("/").rpartition("/")
    Checkpointer(folder, assembly.model, None, context).restore(int(step.removeprefix("step_")))
    batch_size = job.trainer.evaluate_batch_size or job.trainer.global_batch_size
    aside = columns.logged if gate.policy else []
    reader = open_reader(resolved, "train", context, batch_size, every_row=True, aside=aside)
    if not gate.policy:
        return _score(assembly.model, reader, context, gate)
    rows = from_extra("policy_rows", "gate.policy")(
        gate.policy, resolved, assembly.model, reader, context, "gate.policy"
    )
    return replace(_score(assembly.model, reader, context, gate, rows), policy=rows.gather())


def _score(
    model: torch.nn.Module,
    reader: ShardReader,
    context: DistributedContext,
    gate: GateConfig,
    collector: Collector | None = None,
) -> Scores:
    task, slices = task_in(model), sorted(gate.slices)
    parts: dict[str, list[NDArray]] = {name: [] for name in ("logits", "labels", "weights", *slices)}
    parts |= {f"{kind} of {name}": [] for name in gate.held for kind in ("losses", "labels")}
    model.eval()
    batches = reader.batches(epoch=0)
    try:
        with preemption.deferred(), torch.no_grad(), watchdog.stepping("scoring"):
            for batch in islice(batches, reader.steps_per_epoch):
                watchdog.beat()
                _, prediction = model(batch.to(context.device, non_blocking=True))
                if collector is not None:
                    collector.update(clicks_of(task, prediction), batch, prediction)
                if isinstance(task, LabelsTask):
                    _add_held(parts, task, prediction, list(gate.held))
                    prediction = task.of_target(prediction, task.number_of(gate.task)).as_click()
                real = (prediction.sample_weights > 0).cpu()
                counted = real.to(context.device)
                parts["logits"].append(prediction.logits[counted].float().cpu().numpy())
                parts["labels"].append(prediction.labels[counted].float().cpu().numpy())
                parts["weights"].append(prediction.sample_weights[counted].float().cpu().numpy())
                for name in slices:
                    if name not in batch.sparse_features.keys():  # noqa: SIM118
                        raise RetrainingError(
                            f"gate.slices names {name!r}, which is not a feature whose ids the "
                            "model reads unchanged; choose from "
                            f"{', '.join(batch.sparse_features.keys())}"
                        )
                    parts[name].append(first_ids(batch.sparse_features[name])[real.numpy()])
            wanted = preemption.wanted()
    finally:
        batches.close()
    if wanted:
        raise preemption.Preempted
    local = {name: np.concatenate(found) if found else np.zeros(0, np.float32) for name, found in parts.items()}
    return _scores(_gather(local, context), slices, list(gate.held))


def _add_held(parts: dict[str, list[NDArray]], task: LabelsTask, prediction: LabelsPrediction, held: list[str]) -> None:
    for name in held:
        number = task.number_of(name)
        of_target = task.of_target(prediction, number)
        counted = of_target.sample_weights > 0
        losses = losses_of(
            task.targets[number], of_target.outputs[counted].double(), of_target.labels[counted].double()
        )
        parts[f"losses of {name}"].append((losses * of_target.sample_weights[counted]).cpu().numpy())
        parts[f"labels of {name}"].append(of_target.labels[counted].cpu().numpy())


def _scores(gathered: dict[str, NDArray], slices: list[str], held: list[str]) -> Scores:
    weights = gathered["weights"]
    return Scores(
        gathered["logits"],
        gathered["labels"],
        {name: gathered[name].astype(np.int64) for name in slices},
        None if (weights == 1.0).all() else weights,
        {name: HeldScores(gathered[f"losses of {name}"], gathered[f"labels of {name}"]) for name in held},
    )


def _gather(local: dict[str, NDArray], context: DistributedContext) -> dict[str, NDArray]:
    """Collective: return all ranks' rows on rank 0, in the order of ranks."""
    if context.world_size == 1:
        return local
    found: list[dict[str, NDArray]] | None = [{}] * context.world_size if context.is_main else None
    dist.gather_object(local, found, dst=0)
    return {name: np.concatenate([part[name] for part in found]) for name in local} if found else local
