"""Save and restore the random generators of a rank (Python's, NumPy's, torch's on CPU and GPU) as JSON."""

from __future__ import annotations

import base64
import json
import random
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from pipeline import devices

DEVICE = "cuda"  # key in the file: the generator of the accelerator of any kind


def file_name(rank: int) -> str:
    return f"random_{rank:05d}.json"


def rank_of(name: str) -> str:
    """Return the rank's digits in a name made by file_name, or "" for other files."""
    match = re.fullmatch(r"random_(\d{5,})\.json", name)
    return match[1] if match else ""


def seed_random_state(seed: int, rank: int) -> None:
    """Seed each rank with a different value, and every run with the same values. Otherwise a new
    process gets its seed from the system.
    """
    own = random.Random(f"{seed} {rank}").getrandbits(32)
    random.seed(own)
    np.random.seed(own)
    torch.manual_seed(own)  # on all devices


def capture_random_state() -> bytes:
    of_device = devices.current().random_state()
    version, words, gauss = random.getstate()
    legacy: Any = np.random.get_state(legacy=False)
    state = {
        "python": [version, list(words), gauss],
        "numpy": {**legacy, "state": {"key": _encode(legacy["state"]["key"]), "pos": int(legacy["state"]["pos"])}},
        "torch": _encode(torch.get_rng_state().numpy()),
        DEVICE: None if of_device is None else _encode(of_device.numpy()),
    }
    return json.dumps(state).encode()


def capture_owned(owner: Mapping[str, Any]) -> bytes:
    """Return the state with its owner (save, step, rank). The owner shows if a file was exchanged
    (see owners.py).
    """
    return json.dumps({**owner, **json.loads(capture_random_state())}).encode()


def restore_random_state(content: bytes) -> None:
    state = json.loads(content)
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    legacy = state["numpy"]
    legacy["state"]["key"] = np.frombuffer(_decode(legacy["state"]["key"]), dtype=np.uint32)
    np.random.set_state(legacy)
    torch.set_rng_state(_tensor(state["torch"]))
    if state[DEVICE] is not None:
        devices.current().restore_random_state(_tensor(state[DEVICE]))


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Restore the generators after the block, because some libraries (such as rich) draw random
    numbers while they are imported.
    """
    before = capture_random_state()
    yield
    restore_random_state(before)


def _encode(array: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _decode(text: str) -> bytearray:
    return bytearray(base64.b64decode(text))


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(_decode(text), dtype=torch.uint8)
