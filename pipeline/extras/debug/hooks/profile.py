"""Record the training steps that `profile=steps:50-60` names: a trace for Perfetto, and a table of
times by operation."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from torch.profiler import profile

from pipeline import devices
from pipeline.config.jobs.train import TrainJob
from pipeline.config.registry import register
from pipeline.config.training import profiled_steps
from pipeline.devices.base import Device
from pipeline.runtime.logs import get_logger
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.training.hooks.base import Hook, TrainingParts, TrainingState

# The kind of an operation or GPU kernel is the first entry whose text its name contains. "other" is
# everything else, including the time of Python.
KINDS = {
    # TorchRec waits in All2All, ReduceScatter and AllGather.
    "collectives": ("c10d::", "nccl", "gloo", "All2All", "ReduceScatter", "AllGather"),
    "tables forward": ("split_embedding_codegen_forward", "bounds_check_indices", "_Pooled", "dense_embedding_codegen"),
    "tables backward": ("_PooledBackward", "split_embedding_backward", "linearize_index", "RadixSort"),
    "ids handed round": ("fbgemm::", "fbgemm_gpu::", "torchrec::"),
    "optimizer": ("_fused_", "_foreach_", "Optimizer.", "addcdiv", "addcmul", "lerp", "multi_tensor_apply"),
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "gemm", "cutlass", "mkldnn", "_Stack", "_Linear"),
    "interaction": ("_Dots",),
    "copies and casts": ("aten::copy_", "aten::cat", "aten::clone", "aten::index", "memcpy", "Memcpy", "CatArray"),
    "other layers": ("aten::", "at::native"),
}
# first, because the name _PooledBackward contains _Pooled
ORDER = ("tables backward", *(kind for kind in KINDS if kind != "tables backward"))
logger = get_logger(__name__)


@dataclass(frozen=True)
class Share:
    """One kind of operation: milliseconds per step on one rank, and the three operations that took
    the most time."""

    kind: str
    ms_a_step: float
    operations: list[str]


class StepProfiler:
    """Profiles steps `first` to `last` and then writes files into `folder`. Call begin and end
    around each step.

    Steps count from 1, as in log lines. A run that starts within the range records the rest of the
    range.
    """

    def __init__(self, first: int, last: int, folder: str, context: DistributedContext) -> None:
        self._first, self._last, self._folder, self._context = first, last, folder, context
        self._profile: profile | None = None
        self._started = 0.0

    def begin(self, number: int) -> None:
        if self._profile is None and self._first <= number <= self._last:
            activities = devices.current().profiler_activities()
            self._profile, self._first = profile(activities=activities), number
            self._profile.start()
            self._started = time.perf_counter()

    def end(self, number: int) -> None:
        if self._profile is not None and number == self._last:
            self.close(number)

    def close(self, number: int) -> None:
        """Write the recording up to step `number`. Does nothing if nothing is being recorded."""
        if self._profile is None:
            return
        device = devices.current()
        device.synchronize()
        seconds, num_steps = time.perf_counter() - self._started, number - self._first + 1
        self._profile.stop()
        shares = summarize(self._profile, num_steps, device)
        name = f"rank{self._context.rank}.steps_{self._first}-{number}"
        os.makedirs(self._folder, exist_ok=True)
        self._profile.export_chrome_trace(f"{self._folder}/{name}.pt.trace.json.gz")
        table = render(shares, 1e3 * seconds / num_steps)
        with open(f"{self._folder}/{name}.txt", "w") as file:
            file.write(table + "\n")
        if self._context.is_main:
            logger.info(
                "steps %d-%d, %s: open %s/%s.pt.trace.json.gz at ui.perfetto.dev\n%s",
                self._first,
                number,
                device.profiled_time,
                self._folder,
                name,
                table,
            )
        self._profile = None


@register("hook", "profile")
class ProfileSteps(Hook):
    """Profiles the steps in `profile`, if the job sets it."""

    runs_after = "record"  # before the hook that measures throughput, which must not count the profiler's own time

    def __init__(self, job: TrainJob, parts: TrainingParts) -> None:
        super().__init__(job, parts)
        self._profiler: StepProfiler | None = None
        if job.profile:
            self._profiler = StepProfiler(*profiled_steps(job.profile), f"{job.run_dir}/profile", parts.context)

    def on_step_start(self, state: TrainingState) -> None:
        if self._profiler:
            self._profiler.begin(state.step + 1)

    def on_step_end(self, state: TrainingState) -> None:
        if self._profiler:
            self._profiler.end(state.step)

    def on_fit_end(self, state: TrainingState) -> None:
        if self._profiler:
            self._profiler.close(state.step)


def summarize(recorded: profile, num_steps: int, device: Device) -> list[Share]:
    """Return shares sorted by time, largest first.

    Only an operation's own time counts, so no time counts twice.
    """
    times: dict[str, dict[str, float]] = {}
    for event in recorded.key_averages():
        own = device.own_time_us(event)
        if own > 0:
            operations = times.setdefault(kind_of(event.key), {})
            operations[event.key] = operations.get(event.key, 0.0) + own / 1e3 / num_steps
    shares = [
        Share(kind, sum(operations.values()), sorted(operations, key=lambda name: -operations[name])[:3])
        for kind, operations in times.items()
    ]
    return sorted(shares, key=lambda share: -share.ms_a_step)


def kind_of(operation: str) -> str:
    return next((kind for kind in ORDER if any(part in operation for part in KINDS[kind])), "other")


def render(shares: list[Share], wall_ms: float) -> str:
    total = sum(share.ms_a_step for share in shares) or 1.0
    lines = [f"{'':<18}{'ms a step':>10}{'share':>8}   most of it in"]
    lines += [
        f"{share.kind:<18}{share.ms_a_step:>10.2f}{share.ms_a_step / total:>8.1%}   {', '.join(share.operations)[:90]}"
        for share in shares
    ]
    return "\n".join(
        [
            *lines,
            f"{'all':<18}{total:>10.2f}{'':>8}   {wall_ms:.2f} ms a step by the clock, the profiler's own time included",
        ]
    )
