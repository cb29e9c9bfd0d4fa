"""Turn the dense gradient of many small tables into their update at once, compiled by Numba.

Tables lie one after the other in 1-D arrays of fp32, as FBGEMM's dense lookup has them.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pipeline.sharding.kernels.update_kernels import ADAGRAD, ROWWISE_ADAGRAD, U


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _largest(values, begin, end):  # type: ignore[no-untyped-def]
    largest = np.float32(0)
    for k in range(begin, end):
        value = abs(values[k])
        if not value <= largest:  # NaN too
            largest = value
    return largest


@njit(nogil=True, fastmath=True, cache=True)  # type: ignore[untyped-decorator]
def _squares(gradient, begin, end):  # type: ignore[no-untyped-def]
    total = np.float32(0)
    for k in range(begin, end):
        total += gradient[k] * gradient[k]
    return total


@njit(nogil=True, fastmath=True, cache=True)  # type: ignore[untyped-decorator]
def update_rows(weights, gradient, states, rows, dims, kind, lr, eps):  # type: ignore[no-untyped-def]
    """SGD, Adagrad or row-wise Adagrad; tables have `rows` [T] of `dims` [T], states a number a weight, or a row.

    A row whose gradient is all zero would stay as it is by the formulas too: it is not written to.
    """
    begin, state = U(0), U(0)
    for table in range(len(rows)):
        dim = U(dims[table])
        for _ in range(rows[table]):
            end = begin + dim
            if _largest(gradient, begin, end) != np.float32(0):
                if kind == ADAGRAD:
                    for k in range(begin, end):
                        states[k] += gradient[k] * gradient[k]
                        weights[k] -= lr * gradient[k] / (np.sqrt(states[k]) + eps)
                else:
                    scale = lr
                    if kind == ROWWISE_ADAGRAD:
                        states[state] += _squares(gradient, begin, end) / np.float32(dim)
                        scale = lr / (np.sqrt(states[state]) + eps)
                    for k in range(begin, end):
                        weights[k] -= scale * gradient[k]
            begin = end
            state += U(1)
