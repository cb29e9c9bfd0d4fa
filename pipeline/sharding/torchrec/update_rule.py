"""Say by which numbers a table's rows are updated at a step, for the CPU kernels and for replicated tables on any device.

A rule is lazy unless optimizer.sparse.update_rows says otherwise: it changes the rows that a batch touches, and leaves the
others with their moments as they are. Adam's bias
correction goes by the step of the run, as in torch.optim.SparseAdam and in FBGEMM. eps is added after the correction, as in
torch.optim.AdamW and FBGEMM; SparseAdam adds it before, which makes its eps larger in the first steps by
1 / sqrt(1 - beta2 ** step). A row counts as touched where the sum of its gradients (in a table that is cut by columns: of the
shard's part) is not all zero, for a replicated table's gradient tells no more; SparseAdam and FBGEMM also step rows whose
gradient is exactly zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.config.optimizers import find_optimizer
from pipeline.config.training import SparseOptimizerConfig

# The numbers of kernels/optimizer_kernels.py, which imports Numba.
SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM, ROWWISE_ADAM = range(5)


@dataclass(frozen=True)
class UpdateRule:
    """Settings of the tables' optimizer that stay the same from step to step.

    kind: as above. l2: a touched row's gradient gains l2 * its weights, once a step. decay: lr * decay of a touched row's
    weights are taken from it beside the update, as AdamW does. clip_value, clip_norm: the most that a number of a row's summed
    gradient, and then its norm, may be before l2 is added; 0: no limit. By value it is exact however the table is sharded; the
    norm is a row's, in a table that is cut by columns that of the shard's part. all_rows: a step updates untouched rows too,
    as by a gradient of 0, which is what torch.optim.Adam does.
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
        """`l2`, `num_rows`: of the table, however it is sharded. Asserts that the optimizer has a rule (Optimizer.cpu_kernel)."""
        entry = find_optimizer(config.name)
        assert entry.cpu_kernel is not None
        decay = config.weight_decay if config.decouples else 0.0
        return cls(
            entry.cpu_kernel, config.eps, config.beta1, config.beta2, l2 + (config.weight_decay - decay), decay,
            config.gradient_clip_value or 0.0, config.gradient_clip_norm or 0.0, config.updates_all(num_rows),
        )  # fmt: skip

    @property
    def is_lazy(self) -> bool:
        """Whether an untouched row would change, were it updated as a touched one with a gradient of 0."""
        return bool(self.kind >= ADAM or self.l2 or self.decay)

    @property
    def extras(self) -> str:
        """What FBGEMM does not do on CPU, as settings with their values; empty: none."""
        values = {
            "weight_decay or tables.*.l2": self.l2 or self.decay, "gradient_clip_value": self.clip_value,
            "gradient_clip_norm": self.clip_norm,
        }  # fmt: skip
        return ", ".join(f"{name}={value:g}" for name, value in values.items() if value)

    def numbers(self, lr: float, step: int) -> np.ndarray[Any, Any]:
        """What the kernels take at `step`, counted from 1: float32, in the order of optimizer_kernels.LR and what follows it."""
        first, second = 1 - self.beta1**step, 1 - self.beta2**step
        return np.array(
            [lr, self.eps, self.beta1, 1 - self.beta1, 1 / first, self.beta2, 1 - self.beta2, 1 / second,
             1 - lr * self.decay, self.clip_value, self.clip_norm],
            dtype=np.float32,
        )  # fmt: skip
