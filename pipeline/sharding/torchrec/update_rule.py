"""Compute the numbers of a table's update at a step, for the CPU kernels and for replicated tables
on any device.

By default (optimizer.sparse.update_rows) a rule is lazy: it changes the rows that a batch touches,
and leaves other rows and their moments unchanged. Adam's bias correction uses the step of the run,
as torch.optim.SparseAdam and FBGEMM do. eps is added after the correction, as in torch.optim.AdamW
and FBGEMM. SparseAdam adds it before, which makes its eps larger in the first steps by 1 / sqrt(1 -
beta2 ** step). A row counts as touched if the sum of its gradients is not all zero (in a table
sharded by columns: the sum of the shard's part), because the gradient of a replicated table tells
no more. SparseAdam and FBGEMM also update rows whose gradient is exactly zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.config.optimizers import SparseOptimizerConfig, find_optimizer

# The numbers used in devices/cpu/kernels/optimizer.py, which imports Numba.
SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM, ROWWISE_ADAM = range(5)


@dataclass(frozen=True)
class UpdateRule:
    """Settings of the tables' optimizer that stay the same from step to step.

    kind: see above. l2: l2 * weights is added to the gradient of a touched row, once per step.
    decay: lr * decay * weights is subtracted from a touched row in addition to the update, as in
    AdamW. clip_value, clip_norm: limits of the numbers and then of the norm of a row's summed
    gradient, before l2 is added; 0: no limit. Clipping by value is exact under any sharding. The
    norm is that of a row, or of the shard's part if the table is sharded by columns. all_rows: a
    step also updates untouched rows, with a gradient of 0, as torch.optim.Adam does.
    """

    kind: int
    eps: float = 1e-8
    beta1: float = 0.9
    beta2: float = 0.999
    l2: float = 0.0
    decay: float = 0.0
    clip_value: float = 0.0
    clip_norm: float = 0.0
    all_rows: bool = False

    @classmethod
    def of(cls, config: SparseOptimizerConfig, l2: float = 0.0, num_rows: int = 0) -> UpdateRule:
        """Make the rule of a table. Asserts that the optimizer has a rule (Optimizer.cpu_kernel).

        l2, num_rows: of the complete table under any sharding.
        """
        entry = find_optimizer(config.name)
        assert entry.cpu_kernel is not None
        decay = config.weight_decay if config.decouples else 0.0
        return cls(
            entry.cpu_kernel, config.eps, config.beta1, config.beta2, l2 + (config.weight_decay - decay), decay,
            config.gradient_clip_value or 0.0, config.gradient_clip_norm or 0.0, config.updates_all(num_rows),
        )  # fmt: skip

    @property
    def is_lazy(self) -> bool:
        """Return whether an untouched row would change if it were updated with a gradient of 0."""
        return bool(self.kind >= ADAM or self.l2 or self.decay)

    @property
    def extras(self) -> str:
        """Return the settings that FBGEMM ignores on CPU, with their values; empty: none."""
        values = {
            "weight_decay or tables.*.l2": self.l2 or self.decay,
            "gradient_clip_value": self.clip_value,
            "gradient_clip_norm": self.clip_norm,
        }
        return ", ".join(f"{name}={value:g}" for name, value in values.items() if value)

    def numbers(self, lr: float, step: int) -> np.ndarray[Any, Any]:
        """Return the kernels' numbers for `step` (from 1): float32, in the order of
        kernels.optimizer.LR and the constants after it.
        """
        first, second = 1 - self.beta1**step, 1 - self.beta2**step
        return np.array(
            [lr, self.eps, self.beta1, 1 - self.beta1, 1 / first, self.beta2, 1 - self.beta2, 1 / second,
             1 - lr * self.decay, self.clip_value, self.clip_norm],
            dtype=np.float32,
        )  # fmt: skip
