"""Turn timed steps into log lines: training metrics, samples/s, shares of time that waited for input and comms, memory."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipeline.config.training import TrainerConfig
from pipeline.data.read.reader import ShardReader
from pipeline.models.tasks.task import Measure
from pipeline.runtime.logs import MetricsWriter, get_logger
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.sharding.collectives.comms_wait import MEASURED_BACKENDS, CommsWait

logger = get_logger("pipeline.training")


class StepLog:
    """Counts training steps alone: evaluation and saving are not on its clock."""

    def __init__(
        self,
        config: TrainerConfig,
        reader: ShardReader,
        context: DistributedContext,
        writer: MetricsWriter | None,
        start_step: int,
        total_steps: int,
        measure: Measure,
    ) -> None:
        self._reader, self._context, self._writer = reader, context, writer
        self._samples_a_step = config.global_batch_size
        self._total_steps = total_steps
        self._measure = measure
        self._seconds = 0.0
        self._num_steps = 0
        self._logged_step = start_step
        self._comms = CommsWait() if context.backend in MEASURED_BACKENDS else None
        self._comms_seconds = 0.0
        self._logged = self._after_first = (0.0, 0.0, 0.0)  # seconds: all, input stall, comms

    @contextmanager
    def clocked_comms(self, loss: nn.Module) -> Iterator[None]:
        """Steps timed within tell their share of waiting for collectives, where the backend lets it be measured."""
        with self._comms.clocked(loss) if self._comms else nullcontext():
            yield

    @contextmanager
    def timed_step(self) -> Iterator[None]:
        started, waited = time.perf_counter(), self._waited()
        yield
        self._seconds += time.perf_counter() - started
        self._comms_seconds += self._waited() - waited
        self._num_steps += 1
        if self._num_steps == 1:  # the first step also builds: pipeline stages, DDP buckets, threads
            self._after_first = self._now()

    def _waited(self) -> float:
        return self._comms.seconds if self._comms else 0.0

    def _now(self) -> tuple[float, float, float]:
        return self._seconds, self._reader.stall_seconds, self._comms_seconds

    def update(self, prediction: Any) -> None:
        self._measure.update(prediction)

    def write(self, step: int, extra: dict[str, float]) -> None:
        """Collective: one line for the window since the last."""
        values = {
            **self._measure.compute(),
            **self._rates(step - self._logged_step, self._logged),
            "peak_memory_gb": peak_memory_gb(self._context),
            **extra,
        }
        self._logged, self._logged_step = self._now(), step
        logger.info(
            "step %d/%d  %s %.4f  %s samples/s  input stall %.1f %%  %s  %.2f GiB  %.0f s left",
            step,
            self._total_steps,
            "NE" if "ne" in values else "loss",
            values["ne"] if "ne" in values else values["loss"],
            f"{values['samples_per_s']:,.0f}",
            values["input_stall_percent"],
            describe_comms_wait(values),
            values["peak_memory_gb"],
            (self._total_steps - step) * self._seconds / self._num_steps,
        )
        if self._writer:
            self._writer.write("train", step, values)

    def summary(self) -> dict[str, float]:
        """Collective: rates over all steps but the first."""
        rates = self._rates(self._num_steps - 1, self._after_first)
        return {**rates, "peak_memory_gb": peak_memory_gb(self._context)}

    def _rates(self, num_steps: int, since: tuple[float, float, float]) -> dict[str, float]:
        seconds, stall, comms = (now - then for now, then in zip(self._now(), since, strict=True))
        seconds = max(seconds, 1e-9)
        rates = {
            "samples_per_s": num_steps * self._samples_a_step / seconds,
            "input_stall_percent": 100 * stall / seconds,
        }
        return rates | ({"comms_percent": 100 * comms / seconds} if self._comms else {})


def describe_comms_wait(rates: dict[str, float]) -> str:
    return f"comms {rates['comms_percent']:.1f} %" if "comms_percent" in rates else "comms not measured"


def peak_memory_gb(context: DistributedContext) -> float:
    """Collective: GiB of the rank that needed most; device memory on GPUs, resident memory elsewhere."""
    if context.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(context.device) / 2**30
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB
    value = torch.tensor(peak, device=context.device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)
