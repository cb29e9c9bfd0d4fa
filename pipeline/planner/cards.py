"""List figures of GPUs' data sheets by torch's name of the GPU. hardware=auto plans with them.

A driver reports a GPU's memory, but not the bandwidth that a program reaches, or how the GPUs of a
host are connected. GPUs with a preset in conf/hardware have the preset's figures. A host of SXM
modules has NVLink between all of them. PCIe cards use PCIe: a bridge joins two or four of them, and
the slowest link counts.
"""

from __future__ import annotations

from dataclasses import dataclass

PCIE = 25.0  # measured PCIe 4.0 bandwidth between two cards


@dataclass(frozen=True)
class Card:
    """Bandwidths in GB/s in one direction; peaks of dense products in TFLOPS."""

    hbm_gb_per_s: float
    hbm_to_ddr_gb_per_s: float
    intra_host_gb_per_s: float
    tflops_fp32: float
    tflops_bf16: float


# The first words of torch's name, without "NVIDIA". NVIDIA's data sheets; bf16 without sparsity.
CARDS = {
    "A100-SXM4-40GB": Card(1555.0, 32.0, 300.0, 19.5, 312.0),
    "A100-SXM4-80GB": Card(2039.0, 32.0, 300.0, 19.5, 312.0),
    "A100-PCIE-40GB": Card(1555.0, 32.0, PCIE, 19.5, 312.0),
    "A100 80GB PCIe": Card(1935.0, 32.0, PCIE, 19.5, 312.0),
    "H100 80GB HBM3": Card(3350.0, 64.0, 450.0, 67.0, 989.0),
    "H100 PCIe": Card(2000.0, 64.0, PCIE, 51.0, 756.0),
    "H100 NVL": Card(3900.0, 64.0, PCIE, 60.0, 835.0),
    "H200": Card(4800.0, 64.0, 450.0, 67.0, 989.0),
    "H200 NVL": Card(4800.0, 64.0, PCIE, 60.0, 835.0),
    "B200": Card(7700.0, 64.0, 900.0, 75.0, 2250.0),
    "GB300": Card(8000.0, 225.0, 900.0, 80.0, 2500.0),
    "L40S": Card(864.0, 32.0, PCIE, 91.6, 362.0),
    "L4": Card(300.0, 32.0, PCIE, 30.3, 121.0),
}


def find_card(name: str) -> Card | None:
    """Return the card that torch.cuda calls `name`, or None if it is not listed."""
    words = name.removeprefix("NVIDIA ")
    found = [key for key in CARDS if words == key or words.startswith(f"{key} ")]
    return CARDS[max(found, key=len)] if found else None


def is_mig_slice(name: str) -> bool:
    """Return whether the name is that of a part of a GPU, such as "NVIDIA A100-SXM4-40GB MIG
    1g.5gb".
    """
    return "MIG" in name.split()
