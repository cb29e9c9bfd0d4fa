"""Write the hardware config of a measured machine, and describe the measurement in a few lines."""

from __future__ import annotations

from pipeline.extras.step_time.calibration import Calibration

DEFAULT_EXCHANGE = (0.85, 74.0)  # of hardware=cpu, if no ranks were measured


def hardware_yaml(measured: Calibration, path: str) -> str:
    """Return the text of conf/hardware/<name>.yaml: the planner's values and the path of the calibration."""
    machine, conditions, speeds = measured.machine, measured.conditions, measured.speeds
    link, latency = DEFAULT_EXCHANGE
    if speeds.exchange_gb_per_s and speeds.exchange_us:
        link, latency = speeds.exchange_gb_per_s, speeds.exchange_us
    lines = [
        f"# {machine.cores} x {machine.cpu}, {machine.memory_gib:g} GiB, measured by python -m pipeline "
        f"calibrate on {conditions.date}",
        f"# in {conditions.seconds:g} s; other programs took {conditions.busy_cores:g} cores, an operation "
        f"repeated throughout varied by {100 * conditions.noise:.1f} %.",
        f"name: {measured.name}",
        "compute_device: cpu",
        f"ddr_gb_per_s: {speeds.copy_gb_per_s:.1f}         # copy, read and write together",
        f"intra_host_gb_per_s: {link:.2f}   # all-to-all between the ranks of a host",
        f"inter_host_gb_per_s: {link:.2f}   # assumed: there was no second host",
        f"collective_launch_us: {latency:.1f}   # all-to-all of few bytes",
        "intra_host_latency_us: 0.0    # in the launch",
        "inter_host_latency_us: 50.0   # assumed: a round trip by TCP within a rack",
        f"tflops_fp32: {speeds.tflops_fp32:.3f}  # a square product",
        f"tflops_bf16: {speeds.tflops_bf16:.3f}",
        f"calibration: {path}",
    ]
    return "\n".join(lines) + "\n"


def describe(measured: Calibration) -> str:
    conditions, speeds = measured.conditions, measured.speeds
    errors = ", ".join(f"{setup} {100 * measured.error(setup):.0f} %" for setup in measured.setups)
    return (
        f"{len(measured.jobs)} small trainings in {conditions.seconds:g} s; the fitted rates are off by (ranks x "
        f"threads) {errors}\nproducts {1e3 * speeds.tflops_fp32:.0f} GFLOPS in fp32 and "
        f"{1e3 * speeds.tflops_bf16:.0f} in bf16, copies {speeds.copy_gb_per_s:.1f} GB/s\nother programs took "
        f"{conditions.busy_cores:.2f} cores; an operation of {conditions.reference_us:.0f} us repeated throughout "
        f"varied by {100 * conditions.noise:.1f} % (quartiles)"
    )
