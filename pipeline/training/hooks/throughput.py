"""Log training metrics, samples/s, shares of time that waited, and memory; show a progress bar."""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from pipeline import devices
from pipeline.config.jobs.train import TrainJob
from pipeline.config.registry import if_installed, register
from pipeline.models.tasks.task import Measure
from pipeline.runtime.logs import Progress, get_logger, progress, shows_bar
from pipeline.runtime.process.comms_wait import MEASURED_BACKENDS, CommsWait
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.sharding.table_storage import TierStats
from pipeline.training.hooks.base import Hook, TrainingParts, TrainingState

# the log line shows the first of these that is measured
QUALITY = {"ne": "NE", "loss": "loss", "mse": "MSE"}
logger = get_logger("pipeline.training")


def _quality(values: dict[str, float]) -> str:
    """Return the quality for the log line; with several labels, each by its name."""
    of_labels: dict[str, str] = {}
    for name, text in QUALITY.items():
        for key in values:
            label, _, metric = key.rpartition("/")
            if metric == name:
                of_labels.setdefault(label, f"{label} {text} {values[key]:.4f}  ".lstrip())
    return "".join(of_labels.values())


@register("hook", "throughput")
class StepLog(Hook):
    """Logs training metrics and rates. Its clock runs only during training steps, not during
    evaluation and saving."""

    def __init__(self, job: TrainJob, parts: TrainingParts) -> None:
        super().__init__(job, parts)
        window = job.trainer.global_batch_size * job.trainer.log_every_steps
        make_measure = getattr(parts.task, "training_measure", None)
        self._measure: Measure | None = (
            make_measure(parts.context, parts.reader.batch_size, window) if make_measure else None
        )
        self._seconds = self._step_seconds = 0.0
        self._num_steps = self._num_logged = 0  # timed so far, and until the last log line
        self._started = self._waited_before = 0.0
        # CPU time of all threads of this process. Reading it can take half of a small model's step,
        # so it is read once for many steps.
        self._cpu_seconds = 0.0
        self._cpu_started: float | None = None
        self._comms = CommsWait() if parts.context.backend in MEASURED_BACKENDS else None
        self._comms_seconds = 0.0
        # seconds: total, input stall, comms, CPU
        self._logged = self._after_first = (0.0, 0.0, 0.0, 0.0)
        clock = if_installed("tier_clock")
        self._tiers = clock(parts.model) if clock else None
        self._tiers_logged = self._tiers_after_first = TierStats()
        self._open = ExitStack()

    def on_train_start(self, state: TrainingState) -> None:
        if changes := self.job.trainer.loss.changes:
            logger.info("training loss: %s; all metrics are those of the plain log loss", changes)
        if self._comms:  # the time in collectives, if the backend can measure it
            self._open.enter_context(self._comms.clocked(self.parts.task))

    def on_step_start(self, state: TrainingState) -> None:
        self._step_seconds, self._waited_before = 0.0, self._waited()
        if self._cpu_started is None:
            self._cpu_started = time.process_time()
        if self._tiers:
            self._tiers.start()
        self._started = time.perf_counter()

    def on_batch_end(self, state: TrainingState, prediction: Any) -> None:
        if prediction is not None and self._measure:
            self._measure.update(prediction)
        now = time.perf_counter()
        self._step_seconds += now - self._started
        self._started = now

    def on_step_end(self, state: TrainingState) -> None:
        """Count the step. Collective if a line is due."""
        self._seconds += self._step_seconds
        self._comms_seconds += self._waited() - self._waited_before
        self._num_steps += 1
        if self._tiers:
            self._tiers.stop()
        due = state.is_due(self.job.trainer.log_every_steps)
        if due or state.is_over or self._num_steps == 1 or state.is_evaluation_due(self.job.trainer):
            self._count_cpu()
        # the first step also creates pipeline stages, DDP buckets and threads
        if self._num_steps == 1:
            self._after_first, self._tiers_after_first = self._now(), self._tier_stats()
        if not state.preempted and (due or state.is_last):
            self._write(state)

    def _count_cpu(self) -> None:
        """Add the CPU time of the steps since the last count. Work between steps is not counted."""
        if self._cpu_started is not None:
            self._cpu_seconds += time.process_time() - self._cpu_started
            self._cpu_started = None

    def _waited(self) -> float:
        return self._comms.seconds if self._comms else 0.0

    def _tier_stats(self) -> TierStats:
        return self._tiers.total if self._tiers else TierStats()

    def _now(self) -> tuple[float, float, float, float]:
        return self._seconds, self.parts.reader.stall_seconds, self._comms_seconds, self._cpu_seconds

    def _write(self, state: TrainingState) -> None:
        """Write one line for the steps timed since the last line, including steps that a rollback
        dropped. Collective."""
        values = {
            **(self._measure.compute() if self._measure else {}),
            **self._rates(self._num_steps - self._num_logged, self._logged, self._tiers_logged),
            "peak_memory_gb": peak_memory_gb(self.parts.context),
            **self._learning_rates(),
            **state.hooks.log_values(state),
        }
        state.logged = values
        # The measure begins again with the process: after a restart it lacks the steps before.
        is_partial = self._num_steps < min(self.job.trainer.log_every_steps, state.step)
        values |= {"window_steps": float(self._num_steps)} if is_partial else {}
        if self.job.trainer.metrics_port is not None or self.job.logger.otlp_endpoint is not None:
            state.of_ranks = of_ranks(self.parts.context, self._of_this_rank())
        self._logged, self._num_logged, self._tiers_logged = self._now(), self._num_steps, self._tier_stats()
        quality = _quality(values) + (f"of {self._num_steps} steps since the restart  " if is_partial else "")
        logger.info(
            "step %d%s  %s%s samples/s  input stall %.1f %%  %s%s  %.2f GiB  %s",
            state.step,
            "" if state.is_endless else f"/{state.total_steps}",
            quality,
            f"{values['samples_per_s']:,.0f}",
            values["input_stall_percent"],
            describe_tiers(values),
            describe_comms_wait(values),
            values["peak_memory_gb"],
            _remaining(state, values, self._seconds / self._num_steps),
        )
        if self.parts.writer:
            self.parts.writer.write("train", state.step, values)

    def _of_this_rank(self) -> dict[str, float]:
        """Return averages per step since the last line. comms_seconds is missing if the backend
        cannot measure it."""
        seconds, stall, comms, _ = (now - then for now, then in zip(self._now(), self._logged, strict=True))
        steps = max(1, self._num_steps - self._num_logged)
        values = {"step_seconds": seconds / steps, "input_stall_seconds": stall / steps}
        values |= {"comms_seconds": comms / steps} if self._comms else {}
        return {**values, "peak_memory_bytes": own_peak_memory_gb() * 2**30}

    def _learning_rates(self) -> dict[str, float]:
        groups = self.parts.optimizer.param_groups
        trained = [group for group in groups if not getattr(group.get("updates"), "frozen", False)]
        return {"lr_" + str(group.get("name", index)): float(group["lr"]) for index, group in enumerate(trained)}

    def on_rollback(self, state: TrainingState) -> None:
        if self.parts.writer:
            self.parts.writer.drop_after(state.step)

    def on_fit_end(self, state: TrainingState) -> None:
        """Set the rates over all steps except the first. Collective."""
        rates = self._rates(self._num_steps - 1, self._after_first, self._tiers_after_first)
        state.throughput = {**rates, "peak_memory_gb": peak_memory_gb(self.parts.context)}

    def _rates(
        self, num_steps: int, since: tuple[float, float, float, float], tiers_since: TierStats
    ) -> dict[str, float]:
        seconds, stall, comms, cpu = (now - then for now, then in zip(self._now(), since, strict=True))
        seconds = max(seconds, 1e-9)
        rates = {
            "samples_per_s": num_steps * self.job.trainer.global_batch_size / seconds,
            "samples_per_cpu_s": num_steps
            * self.job.trainer.global_batch_size
            / max(cpu * self.parts.context.world_size, 1e-9),
            "input_stall_percent": 100 * stall / seconds,
        }
        if self._tiers:  # only of rank 0, which waits in collectives for the SSDs of other ranks
            rates |= self._tiers.rates(tiers_since, seconds, num_steps)
        return rates | ({"comms_percent": 100 * comms / seconds} if self._comms else {})

    def close(self) -> None:
        self._open.close()


def describe_tiers(rates: dict[str, float]) -> str:
    """Return the rates as text, "" if no table has tiers."""
    if "tier_stall_percent" not in rates:
        return ""
    return (
        f"tier stall {rates['tier_stall_percent']:.1f} %  hits {rates['tier_hit_percent']:.1f} %  SSD "
        f"{rates['tier_read_mb_per_step']:.1f} + {rates['tier_written_mb_per_step']:.1f} MB a step  "
    )


def _remaining(state: TrainingState, values: dict[str, float], step_seconds: float) -> str:
    """Return the estimated remaining time; for a stream, how far behind the training is."""
    if not state.is_endless:
        return f"{(state.total_steps - state.step) * step_seconds:.0f} s left"
    behind = [
        f"{values[name]:,.0f} {name.rpartition('_')[2]} behind" for name in values if name.startswith("stream_behind_")
    ]
    age = values.get("stream_event_age_seconds")
    return ", ".join([*behind, *([] if age is None else [f"events {age:.1f} s old"])])


def describe_comms_wait(rates: dict[str, float]) -> str:
    return f"comms {rates['comms_percent']:.1f} %" if "comms_percent" in rates else "comms not measured"


def peak_memory_gb(context: DistributedContext) -> float:
    """Return the peak memory in GiB of the rank that used most; see own_peak_memory_gb.
    Collective."""
    value = torch.tensor(own_peak_memory_gb(), device=context.device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def own_peak_memory_gb() -> float:
    """Return this rank's peak memory in GiB: device memory on GPUs, otherwise resident memory."""
    return devices.current().peak_memory_bytes() / 2**30


def of_ranks(context: DistributedContext, values: dict[str, float]) -> list[dict[str, float]]:
    """Return each rank's values in the order of ranks, with its straggler_score if comms_seconds is
    known. Collective. All ranks must pass the same names. Collectives make the step times of all
    ranks equal, so the score needs comms_seconds."""
    own = torch.tensor(list(values.values()), dtype=torch.float64, device=context.device)
    gathered = [torch.empty_like(own) for _ in range(context.world_size)]
    dist.all_gather(gathered, own)
    ranks = [dict(zip(values, each.tolist(), strict=True)) for each in gathered]
    if "comms_seconds" not in values:
        return ranks
    scores = straggler_scores([each["step_seconds"] - each["comms_seconds"] for each in ranks])
    return [{**each, "straggler_score": score} for each, score in zip(ranks, scores, strict=True)]


def straggler_scores(busy_seconds: list[float]) -> list[float]:
    """Return the busy time per step of each rank divided by the median of all ranks. Waiting for
    others is not busy time."""
    middle = max(statistics.median(busy_seconds), 1e-9)
    return [seconds / middle for seconds in busy_seconds]


@register("hook", "memory")
class MemoryReport(Hook):
    _is_reported = False

    def on_step_end(self, state: TrainingState) -> None:
        parts = self.parts
        if not self._is_reported and parts.memory is not None and parts.plan is not None:
            parts.memory.report(parts.plan)
        self._is_reported = True


@register("hook", "progress")
class ProgressBar(Hook):
    _bar: Progress | None = None
    _step = 0  # the step that the bar shows

    def on_train_start(self, state: TrainingState) -> None:
        self._open, self._step = ExitStack(), state.step
        visible = self.parts.context.is_main and shows_bar()
        self._bar = self._open.enter_context(progress("training", state.total_steps - state.step, visible=visible))

    def on_step_end(self, state: TrainingState) -> None:
        self._show(state.step)

    def on_rollback(self, state: TrainingState) -> None:
        self._show(state.step)

    def _show(self, step: int) -> None:
        if self._bar is not None:
            self._bar.advance(step - self._step)  # negative after a rollback
            self._step = step

    def close(self) -> None:
        if self._bar is not None:
            self._bar = None
            self._open.close()
