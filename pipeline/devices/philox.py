"""Sample numbers that depend only on a key and a position (Philox-4x32-10), equal on any device.

Philox (Salmon, Moraes, Dror and Shaw, SC 2011) turns a counter and a key into four words of 32
bits. Numbers are made in groups of GROUP: lane l of group g has the counter LANES * g + l, and its
word w makes the number GROUP * g + LANES * w + l. The upper 24 bits of a word make a uniform
number. Words 0 and 1, and words 2 and 3, make two normal numbers each (Box-Muller). Logarithm, sine
and cosine are Cephes' polynomials. Their sums, products and roots are rounded equally on every
device, so torch's operations, also on a GPU, and the compiled kernels give the same bits.
"""

from __future__ import annotations

import math
from importlib.util import find_spec

import numpy as np
import torch

from pipeline.devices.cpu.kernel_pool import on_all_threads

GROUPS_AT_ONCE = {"cuda": 1 << 14}  # 4 Mi numbers; for torch's operations
OTHERWISE_AT_ONCE = 1 << 8


def fill_uniform(out: torch.Tensor, key: int, first: int, bound: float) -> None:
    """Fill out [n] (float32) with the key's numbers from number `first` on, uniform in [-bound, bound]."""
    _fill(out, key, first, is_normal=False, unit=bound * 2.0**-23)


def fill_normal(out: torch.Tensor, key: int, first: int, std: float) -> None:
    """Fill out [n] (float32) with the key's normal numbers from number `first` on. All are within 5.9 std."""
    _fill(out, key, first, is_normal=True, unit=std)


@torch.no_grad()
def _fill(out: torch.Tensor, key: int, first: int, *, is_normal: bool, unit: float) -> None:
    assert out.dtype == torch.float32 and out.dim() == 1 and out.is_contiguous()
    begin, end = first // GROUP, -(-(first + len(out)) // GROUP)
    if out.device.type == "cpu" and find_spec("numba") is not None:
        from pipeline.devices.cpu.kernels.philox import fill

        arguments = (
            out.detach().numpy(), np.uint64(first), np.uint64(key & LOW), np.uint64(key >> 32), is_normal, np.float32(unit),
        )  # fmt: skip
        on_all_threads(fill, arguments, end - begin)
        return
    at_once = GROUPS_AT_ONCE.get(out.device.type, OTHERWISE_AT_ONCE)
    for group in range(begin, end, at_once):
        words = _words(key, group, min(at_once, end - group), out.device)
        numbers = (_normal if is_normal else _uniform)(words, float(np.float32(unit))).reshape(-1)
        low, high = max(group * GROUP, first), min(group * GROUP + len(numbers), first + len(out))
        out[low - first : high - first] = numbers[low - group * GROUP : high - group * GROUP]


def _words(key: int, first_group: int, num_groups: int, device: torch.device) -> torch.Tensor:
    """Return [num_groups, 4, LANES] int64 in 0..2^32 - 1. Products beyond 2^63 wrap, so all 64 bits are right."""
    counter = torch.arange(first_group * LANES, (first_group + num_groups) * LANES, device=device)
    x0, x1 = counter & LOW, counter >> 32
    x2, x3 = torch.zeros_like(x0), torch.zeros_like(x0)
    a, b = key & LOW, key >> 32
    for _ in range(ROUNDS):
        p, q = x0 * MULTIPLIERS[0], x2 * MULTIPLIERS[1]
        x0, x1 = ((q >> 32) & LOW) ^ x1 ^ a, q & LOW
        x2, x3 = ((p >> 32) & LOW) ^ x3 ^ b, p & LOW
        a, b = (a + KEY_STEPS[0]) & LOW, (b + KEY_STEPS[1]) & LOW
    return torch.stack([word.view(num_groups, LANES) for word in (x0, x1, x2, x3)], dim=1)


def _centred(words: torch.Tensor) -> torch.Tensor:
    """Map words to the centres of 2^24 equal parts of [-2^23, 2^23]."""
    signed = (words ^ 0x80000000) - 0x80000000
    return (signed >> 8).float() + 0.5


def _uniform(words: torch.Tensor, unit: float) -> torch.Tensor:
    return _centred(words) * unit


def _normal(words: torch.Tensor, std: float) -> torch.Tensor:
    word0, word1 = words[:, 0::2].contiguous(), words[:, 1::2].contiguous()
    # torch's float32 square root is sometimes off by one bit; the float64 root rounds correctly.
    square = _log((word0 >> 8).float() * 2.0**-24 + 2.0**-25) * -2.0
    radius = square.double().sqrt().float() * std
    angle = _centred((word1 << 2) & LOW) * float(np.float32(TURN))
    square = angle * angle
    sine = ((square * SINE[2] + SINE[1]) * square + SINE[0]) * (square * angle) + angle
    cosine = ((square * COSINE[2] + COSINE[1]) * square + COSINE[0]) * (square * square) + (1.0 - square * 0.5)
    quadrant = word1 >> 30
    radius = radius * (1.0 - (quadrant & 2).float())
    is_odd = (quadrant & 1) != 0
    pair = radius * torch.where(is_odd, -sine, cosine), radius * torch.where(is_odd, cosine, sine)
    return torch.stack(pair, dim=2)  # [groups, pairs, 2, LANES], in the order of the words


def _log(u: torch.Tensor) -> torch.Tensor:
    """Return the natural logarithm of float32 numbers above 0."""
    shifted = u.view(torch.int32) - ROOT_HALF
    exponent = (shifted >> 23).float()
    m = ((shifted & 0x007FFFFF) + ROOT_HALF).view(torch.float32) - 1.0
    z = m * m
    high = (z * LOG[8] + (m * LOG[7] + LOG[6])) * (z * z)
    high = high + ((m * LOG[5] + LOG[4]) * z + (m * LOG[3] + LOG[2]))
    return (high * z + (m * LOG[1] + LOG[0])) * (m * z) + ((exponent * LN2 + m) - z * 0.5)


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
