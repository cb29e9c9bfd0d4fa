"""Compare this trainer with TorchRec's documented loop on the device of this rank, in one process.

    python -m benchmarks.gpu_sides losses     equal weights, batches and rates: the loss of each step
    python -m benchmarks.gpu_sides speed --presets quickstart kaggle_full dlrmv2_large
    python -m benchmarks.gpu_sides predict --hardware h100_80gb     what the planner says of the same steps; needs no GPU
    python -m benchmarks.gpu_sides facts      what torch says about the GPUs of this machine

Each writes one JSON object to --output. benchmarks.gpu_report starts them, one process each, because a CUDA fault
ends the process that meets it. Under torchrun they run on several ranks; rank 0 writes.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor

from benchmarks.step_models import PRESETS, draw, our_loop, our_side, resolved_job, torchrec_loop, torchrec_side
from pipeline import devices
from pipeline.devices.process_group import init_distributed
from pipeline.extras.step_time.plan_forecast import step_request
from pipeline.extras.step_time.prediction import predict_step
from pipeline.models.tasks.click_metrics import Prediction
from pipeline.planner.planner import make_plan
from pipeline.training.plan_job import build_request
from pipeline.training.sharded_model import ShardedModel

LOSS_STEPS = 12
# TorchRec's side of step_models has these rates; eps and betas are the defaults of both sides.
SAME_RATES = ["optimizer.sparse.lr=0.02", "optimizer.dense.lr=0.001"]
ROUNDS, STEPS = 5, 30


def _whole(value: torch.Tensor | ShardedTensor) -> torch.Tensor:
    """Return a state_dict's value as one tensor; only for one rank, which holds all shards."""
    return value.local_shards()[0].tensor if isinstance(value, ShardedTensor) else value


def copy_weights(source: torch.nn.Module, target: torch.nn.Module) -> int:
    """Copy TorchRec's weights into our model by name and return how many tensors were copied."""
    # The two sides name the tables t_cat_0 and cat_0.
    weights = {name.replace(".t_cat_", ".cat_"): _whole(value) for name, value in source.state_dict().items()}
    ours = target.state_dict()
    if missing := sorted(set(ours) ^ set(weights)):
        raise AssertionError(f"the two models differ in {len(missing)} weights, the first is {missing[0]}")
    with torch.no_grad():
        for name, value in ours.items():
            _whole(value).copy_(weights[name])
    return len(ours)


def losses(options: argparse.Namespace) -> dict[str, Any]:
    """Train both sides on one rank from equal weights and return the loss of each step."""
    context = init_distributed()
    preset = PRESETS["quickstart"]
    raw = draw(preset, context.rank)
    model, step = torchrec_side(preset, raw, context, ["table_wise"])
    plain = ["trainer.log_every_steps=1000000", *SAME_RATES, *options.overrides]
    assembly, run = our_side(preset, raw, context, plain)
    num_tensors = copy_weights(model, assembly.model)
    ours = _record_losses(assembly)
    run(LOSS_STEPS - 1)  # trains one step more than it is asked for
    return {
        "device": str(context.device),
        "num_tensors": num_tensors,
        "torchrec": [float(step()) for _ in range(LOSS_STEPS)],
        "ours": [float(loss) for loss in ours],
    }


def _record_losses(assembly: ShardedModel) -> list[torch.Tensor]:
    """Return a list that grows by the loss of each training batch."""
    seen: list[torch.Tensor] = []

    def record(module: torch.nn.Module, inputs: Any, output: tuple[torch.Tensor, Prediction]) -> None:
        seen.append(output[0].detach().clone())

    assembly.task.register_forward_hook(record)
    return seen


def speed(options: argparse.Namespace) -> dict[str, Any]:
    """Time both sides in turns; the figures of a preset are medians over the rounds.

    With TF32 the same models run again, because it is a switch of the process.
    """
    context = init_distributed()
    found = {}
    for name in options.presets:
        preset = PRESETS[name]
        raw = draw(preset, context.rank)
        sides = {
            "torchrec": torchrec_loop(preset, raw, context),
            "ours": our_loop(preset, raw, context, options.overrides),
            "ours bf16": our_loop(preset, raw, context, ["trainer.precision=bf16", *options.overrides]),
        }
        sides |= {f"{side} tf32": sides[side] for side in ("torchrec", "ours")}
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(options.rounds):
            for side, run in sides.items():
                devices.current().use_tf32("tf32" in side)
                seconds[side].append(run(options.steps).seconds_a_step)
        ms = {side: 1e3 * statistics.median(values) for side, values in seconds.items()}
        found[name] = {
            "ms_a_step": ms,
            "spread_ms": {side: [1e3 * min(values), 1e3 * max(values)] for side, values in seconds.items()},
            "samples_per_s": {side: 1e3 * preset.batch_size * context.world_size / value for side, value in ms.items()},
            "ratio": ms["torchrec"] / ms["ours"],
            "ratio_tf32": ms["torchrec tf32"] / ms["ours tf32"],
            "ratio_bf16": ms["torchrec"] / ms["ours bf16"],
        }
        del sides
        if context.device.type == "cuda":
            torch.cuda.empty_cache()
    return {"device": str(context.device), "world_size": context.world_size, "presets": found}


def predict(options: argparse.Namespace) -> dict[str, Any]:
    """Return the planner's prediction of our side's step on one GPU of `options.hardware`, in milliseconds."""
    found: dict[str, dict[str, float]] = {}
    for name in options.presets:
        for precision in ("fp32", "tf32", "bf16"):
            words = [f"hardware={options.hardware}", f"trainer.precision={precision}", "planner.timeout_s=2"]
            resolved = resolved_job(PRESETS[name], "cuda", 1, [*words, *options.overrides])
            request = build_request(resolved)
            step = predict_step(step_request(resolved, request, make_plan(resolved.job.planner, request), 1))
            found.setdefault(name, {})[precision] = step.step_ms
    return {"hardware": options.hardware, "step_ms": found}


def facts(options: argparse.Namespace) -> dict[str, Any]:
    """Return what torch says about the GPUs."""
    gpus = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        memory_gb = round(about.total_memory / 2**30, 2)
        gpus.append({"name": about.name, "memory_gb": memory_gb, "capability": [about.major, about.minor]})
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["losses", "speed", "predict", "facts"])
    parser.add_argument("--presets", nargs="+", default=["quickstart", "kaggle_full", "dlrmv2_large"])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--hardware", default="h100_80gb", help="of predict: an option of conf/hardware")
    parser.add_argument("--overrides", nargs="*", default=[], help="of our side")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    found = {"losses": losses, "speed": speed, "predict": predict, "facts": facts}[options.what](options)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        options.output.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
