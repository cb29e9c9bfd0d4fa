"""Write the hardware config of a measured machine, and say in a few lines what was measured."""

from __future__ import annotations

from collections import Counter

from pipeline.planner.step_time.measurements import Measurement, Measurements

COPY_BYTES = 16 << 20
LARGE_BYTES, SMALL_BYTES = 2 << 20, 512


def hardware_yaml(measured: Measurements, path: str) -> str:
    """conf/hardware/<name>.yaml: bandwidths and latencies as the planner reads them, and the calibration's file."""
    machine, conditions = measured.machine, measured.conditions
    link, latency = _link(measured)
    lines = [
        f"# {machine.cores} x {machine.cpu}, {machine.memory_gib:g} GiB, measured by python -m pipeline calibrate on {conditions.date}",
        f"# in {conditions.seconds:g} s; other programs took {conditions.busy_cores:g} cores, an operation repeated throughout varied by "
        f"{100 * conditions.noise:.1f} %.",
        f"name: {measured.name}",
        "compute_device: cpu",
        f"ddr_gb_per_s: {copy_gb_per_s(measured):.1f}         # copy (read + write) of {COPY_BYTES >> 20} MiB or the nearest size",
        f"intra_host_gb_per_s: {link:.2f}   # all-to-all of {LARGE_BYTES >> 20} MiB between the ranks of a host",
        f"inter_host_gb_per_s: {link:.2f}   # assumed: no second host was there",
        f"collective_launch_us: {latency:.1f}   # all-to-all of {SMALL_BYTES} bytes",
        "intra_host_latency_us: 0.0    # in the launch",
        "inter_host_latency_us: 50.0   # assumed: a round trip by TCP within a rack",
        f"tflops_fp32: {peak_tflops(measured, 'fp32'):.3f}  # the fastest product measured",
        f"tflops_bf16: {peak_tflops(measured, 'bf16'):.3f}",
        f"calibration: {path}",
    ]
    return "\n".join(lines) + "\n"


def describe(measured: Measurements) -> str:
    conditions = measured.conditions
    kinds = Counter(row.kind for row in measured.rows)
    setups = ", ".join(measured.setups)
    return (
        f"{len(measured.rows)} measurements of {len(kinds)} kinds in {conditions.seconds:g} s, ranks x threads {setups}: products up to "
        f"{1e3 * peak_tflops(measured, 'fp32'):.0f} GFLOPS in fp32 and {1e3 * peak_tflops(measured, 'bf16'):.0f} in bf16, copies "
        f"{copy_gb_per_s(measured):.1f} GB/s\nother programs took {conditions.busy_cores:.2f} cores; one operation of "
        f"{conditions.reference_us:.0f} us repeated throughout varied by {100 * conditions.noise:.1f} % (quartiles)"
    )


def peak_tflops(measured: Measurements, dtype: str) -> float:
    rows = [row for row in measured.rows if row.kind == "gemm" and row.shape["dtype"] == dtype]
    return max((_flops(row) / row.us / 1e6 for row in rows), default=0.0)


def copy_gb_per_s(measured: Measurements) -> float:
    rows = [row for row in measured.rows if row.kind == "copy" and row.shape["dtype"] == "fp32"]
    if not rows:
        return 0.0
    nearest = min(rows, key=lambda row: abs(float(row.shape["bytes"]) - 2 * COPY_BYTES))
    return float(nearest.shape["bytes"]) / nearest.us / 1e3


def _flops(row: Measurement) -> float:
    return 2.0 * float(row.shape["m"]) * float(row.shape["n"]) * float(row.shape["k"])


def _link(measured: Measurements) -> tuple[float, float]:
    """GB/s between ranks and microseconds of a small message; 0.85 and 74 where no ranks were measured (hardware=cpu)."""
    rows = [row for row in measured.rows if row.kind == "shared_all_to_all"] or [
        row for row in measured.rows if row.kind.endswith("_all_to_all")
    ]
    if not rows:
        return 0.85, 74.0
    ranks = float(rows[0].shape["ranks"])
    large = min(rows, key=lambda row: abs(float(row.shape["bytes"]) - LARGE_BYTES))
    small = min(rows, key=lambda row: float(row.shape["bytes"]))
    return float(large.shape["bytes"]) * (ranks - 1) / ranks / large.us / 1e3, small.us
