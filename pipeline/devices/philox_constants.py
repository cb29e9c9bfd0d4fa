"""Constants of philox.py, which its compiled kernels share."""

from __future__ import annotations

import math

# changing them changes every model that a given seed initializes
LANES, GROUP, ROUNDS = 64, 256, 10
MULTIPLIERS, KEY_STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
LOW = 0xFFFFFFFF
# Cephes' logf, sinf and cosf (netlib.org/cephes), coefficients from the lowest power up.
LOG = (
    3.3333331174e-1, -2.4999993993e-1, 2.0000714765e-1, -1.6668057665e-1, 1.4249322787e-1, -1.2420140846e-1,
    1.1676998740e-1, -1.1514610310e-1, 7.0376836292e-2,
)  # fmt: skip
SINE = (-1.6666654611e-1, 8.3321608736e-3, -1.9515295891e-4)
COSINE = (4.166664568298827e-2, -1.388731625493765e-3, 2.443315711809948e-5)
# ROOT_HALF: the bits of sqrt(1/2)
LN2, ROOT_HALF, TURN = math.log(2), 0x3F3504F3, math.pi / 4 * 2.0**-23
