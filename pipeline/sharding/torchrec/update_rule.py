"""Say by which numbers a table's rows are updated at a step, for the CPU kernels and for replicated tables on any device.

Every rule is lazy: it changes the rows that a batch touches, and leaves the others with their moments as they are. Adam's bias
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

# The numbers of kernels/update_kernels.py, which imports Numba.
SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM, ROWWISE_ADAM = range(5)


@dataclass(frozen=True)
class UpdateRule:
    """Settings of the tables' optimizer that stay the same from step to step.

    kind: as above. l2: a touched row's gradient gains l2 * its weights, once a step. decay: lr * decay of a touched row's
    weights are taken from it beside the update, as AdamW does.
    """

    kind: int
    eps: float = 1e-8
    beta1: float = 0.9
    beta2: float = 0.999
    l2: float = 0.0
    decay: float = 0.0

    @classmethod
    def of(cls, config: SparseOptimizerConfig) -> UpdateRule:
        """Asserts that the optimizer has a rule (Optimizer.cpu_kernel)."""
        entry = find_optimizer(config.name)
        assert entry.cpu_kernel is not None
        decoupled = entry.decay_mode == "DECOUPLE"
        return cls(
            entry.cpu_kernel, config.eps, config.beta1, config.beta2,
            l2=0.0 if decoupled else config.weight_decay, decay=config.weight_decay if decoupled else 0.0,
        )  # fmt: skip

    @property
    def is_lazy(self) -> bool:
        """Whether an untouched row would change, were it updated as a touched one with a gradient of 0."""
        return bool(self.kind >= ADAM or self.l2 or self.decay)

    def numbers(self, lr: float, step: int) -> np.ndarray[Any, Any]:
        """What the kernels take at `step`, counted from 1: float32, in the order of update_kernels.LR and what follows it."""
        first, second = 1 - self.beta1**step, 1 - self.beta2**step
        return np.array(
            [lr, self.eps, self.beta1, 1 - self.beta1, 1 / first, self.beta2, 1 - self.beta2, 1 / second,
             1 - lr * self.decay, 0.0, 0.0],
            dtype=np.float32,
        )  # fmt: skip
