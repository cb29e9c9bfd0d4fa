"""Fit non-negative rates: the time of a step is the sum of its amounts, each multiplied by its rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

Floats = NDArray[np.float64]
PRIOR_WEIGHT = 0.6  # a rate of twice the prior costs as much as an error of this size in one job
ROUNDS, MIN_RATIO = 4, 0.2
# Microseconds per call or row, or per million FLOPs or bytes, for one core of a Xeon, rounded. A
# calibration with few jobs stays near these values.
DEFAULT_RATES = {
    "steps": 1200.0, "calls": 2.0, "products": 20.0, "handed": 10.0,
    "flops_fp32": 5.8, "flops_bf16": 1.0, "batched_flops": 0.5,
    "fp32_product_bytes": 100.0, "bf16_product_bytes": 300.0,
    "moved_bytes": 52.0, "drawn_bytes": 800.0, "norm_bytes": 770.0, "updated_layer_bytes": 155.0,
    "features": 15.0, "bags": 0.01, "ids": 0.01, "row_bytes": 200.0, "pooled_bytes": 90.0,
    "state_bytes": 50.0,
    "whole_shardings": 300.0, "row_shardings": 1500.0, "replicated_shardings": 300.0, "norms": 100.0,
    "whole_exchange_bytes": 1000.0, "row_exchange_bytes": 3000.0, "averaged_bytes": 1500.0,
}  # fmt: skip


def fit_rates(
    jobs: Sequence[Mapping[str, float]], times_us: Sequence[float], prior: Mapping[str, float]
) -> dict[str, float]:
    """Minimize the sum of the squared relative errors and of the squared distances of rates from
    the prior.

    Plain least squares of relative errors prefers predictions that are too small. So each round
    weights a job by the job's prediction in the previous round.
    """
    names = list(prior)
    times = np.array(times_us, dtype=np.float64)
    terms = np.array([[job.get(name, 0.0) for name in names] for job in jobs]) / times[:, None]
    # A rate with a prior of 0 may still grow: it is pulled towards a small value.
    scale = np.array([max(prior[name], 0.05 * DEFAULT_RATES[name]) for name in names])
    # A machine may be slower in everything, so rates are pulled towards the prior's times one
    # factor.
    scale /= np.exp(np.log(terms @ scale).mean())
    pull = PRIOR_WEIGHT * np.eye(len(names))
    weights = np.ones(len(times))
    rates = scale
    for _ in range(ROUNDS):
        matrix = np.vstack([terms * scale * weights[:, None], pull])
        solved, _ = nnls(matrix, np.concatenate([weights, np.full(len(names), PRIOR_WEIGHT)]))
        rates = solved * scale
        weights = np.sqrt(1 / np.maximum(terms @ rates, MIN_RATIO))
    return dict(zip(names, map(float, rates), strict=True))
