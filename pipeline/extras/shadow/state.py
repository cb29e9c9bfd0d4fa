"""Hold the settings of the shadow GPUs of this process, which shadow.activate() sets, and define a patch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GIB = 1 << 30


@dataclass(frozen=True)
class Card:
    """The properties of a card in torch.cuda.get_device_properties. Clocks in kHz, bus in bits."""

    name: str
    total_memory: int
    capability: tuple[int, int]
    num_sms: int
    memory_clock_khz: int
    memory_bus_bits: int


# Totals as torch prints them. Clocks and buses give the data sheet's bandwidth (2 x clock x bus).
CARDS = {
    "a100_40gb": Card("NVIDIA A100-SXM4-40GB", int(39.4 * GIB), (8, 0), 108, 1_215_000, 5120),
    "a100_80gb": Card("NVIDIA A100-SXM4-80GB", int(79.1 * GIB), (8, 0), 108, 1_593_000, 5120),
    "h100_80gb": Card("NVIDIA H100 80GB HBM3", int(79.1 * GIB), (9, 0), 132, 2_619_000, 5120),
    "h200": Card("NVIDIA H200", int(139.7 * GIB), (9, 0), 132, 3_201_000, 6144),
}


@dataclass
class Settings:
    """num_gpus: of this host. untouched_above_bytes: larger tensors are reserved, not touched."""

    num_gpus: int = 0
    card: Card = CARDS["h100_80gb"]
    total_memory_bytes: int = CARDS["h100_80gb"].total_memory
    untouched_above_bytes: int = 1 << 62
    is_active: bool = False


settings = Settings()


@dataclass(frozen=True)
class Patch:
    """A patch that replaces target.name by value. `why` is the reason."""

    target: Any
    name: str
    value: Any
    why: str

    def __str__(self) -> str:
        target = getattr(self.target, "__qualname__", getattr(self.target, "__name__", self.target))
        return f"{target}.{self.name}: {self.why}"
