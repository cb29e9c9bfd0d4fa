"""Write TensorBoard's event files: training and validation of a metric in one chart, system metrics
in separate charts.

TensorBoard shows each folder of event files as a run and draws runs with the same tag in one chart,
so training and validation are two folders. HParams are written with validation, whose metrics
TensorBoard's table then compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pipeline.runtime.masking import mask
from pipeline.runtime.storage import storage

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

SYSTEM = {
    "samples_per_s", "samples_per_cpu_s", "input_stall_percent", "comms_percent", "peak_memory_gb", "num_skipped_steps",
    "num_bad_rows", "embedding_syncs", "embedding_sync_bytes", "embedding_sync_s",
    "tier_stall_percent", "tier_hit_percent", "tier_row_hit_percent", "tier_read_mb_per_step", "tier_written_mb_per_step",
}  # fmt: skip
LEARNING_RATE = "lr_"
COMPARED = "validation"  # the kind of line that HParams are written with


def tag_of(name: str) -> str:
    """Return the tag of a number of metrics.jsonl, which begins with TensorBoard's group."""
    if name in SYSTEM:
        return f"system/{name}"
    if name.startswith(LEARNING_RATE):
        return f"learning_rate/{name.removeprefix(LEARNING_RATE)}"
    return name if "/" in name else f"quality/{name}"  # metrics of several labels, such as label/ne


class EventFiles:
    """Write a folder of event files for each kind of line.

    The first line opens it, so a run without lines leaves no file.

    config: dotted key -> value, shown as text and as HParams.
    """

    def __init__(self, folder: str, after_step: int, config: Mapping[str, object]) -> None:
        import torch.utils.tensorboard  # noqa: F401  # costs a second; here, for what is imported may draw random numbers

        self.folder, self._config, self._after_step = folder, config, after_step
        self._writers: dict[str, SummaryWriter] = {}

    def write(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        writer = self._writers.get(kind) or self._begin(kind, values)
        for name, value in values.items():
            writer.add_scalar(tag_of(name), value, step)

    def _begin(self, kind: str, values: Mapping[str, float]) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        purge_step = self._after_step + 1 if self._after_step else None
        writer = SummaryWriter(storage.join(self.folder, kind), purge_step=purge_step)
        self._writers[kind] = writer
        if self._config and kind == COMPARED:
            told = {key: _plain(value) for key, value in self._config.items()}
            assert writer.file_writer is not None
            for summary in hparams(told, {tag_of(name): value for name, value in values.items()}):
                writer.file_writer.add_summary(summary)
        elif self._config:
            writer.add_text("config", "\n".join(f"    {key}: {_plain(value)}" for key, value in self._config.items()))
        return writer

    def close(self, after_step: int | None = None) -> None:
        """Close the files. after_step: the run continues from this step, and TensorBoard drops
        later numbers.
        """
        for writer in self._writers.values():
            writer.close()
        self._writers = {}
        self._after_step = self._after_step if after_step is None else after_step


def _plain(value: object) -> bool | int | float | str:
    return value if isinstance(value, (bool, int, float)) else mask(str(value))
