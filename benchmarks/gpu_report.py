"""Check and measure a GPU machine, and write one JSON file and one page:  make gpu-report

    python -m benchmarks.gpu_report [--output gpu_report] [--sections tests speed ...] [--shadow]

Takes about ten minutes on one GPU. Each section runs in processes of its own, because a CUDA fault ends the process
that meets it; a section that fails is reported, and the next one runs. With two GPUs or more the sections on NCCL run
as well. --shadow runs the same program on shadow GPUs: this checks the report itself, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu_report_page import render
from pipeline.planner.hardware import CARDS, find_card

ROOT = Path(__file__).resolve().parents[1]
SECTION_TIMEOUT_S = 240
# Relative differences of losses that rounding explains: fp32 sums in another order, then shorter formats.
SAME, TF32, HALF, INT8 = 1e-4, 2e-3, 2e-2, 5e-2
SHORT = ["--presets", "quickstart", "--rounds", "1", "--steps", "2"]
STEP_FACTOR = 2.0  # between a measured and a predicted step
# Options of conf/hardware by the names in planner.hardware.
PRESETS = {
    "A100-SXM4-40GB": "a100_40gb",
    "A100-SXM4-80GB": "a100_80gb",
    "H100 80GB HBM3": "h100_80gb",
    "H200": "h200",
    "B200": "b200",
    "GB300": "gb300",
    "L40S": "l40s",
}


@dataclass
class Check:
    """One statement that holds or not; `passed` is None if it could not be tried."""

    name: str
    found: str
    wanted: str
    passed: bool | None


@dataclass
class Section:
    name: str
    title: str
    checks: list[Check] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    seconds: float = 0.0


class CommandError(Exception):
    """A command of a section failed; the message is the end of what it printed."""


@dataclass
class Machine:
    """Where commands run, and on what."""

    folder: Path  # scratch: data, runs, results of commands
    shadow: bool
    num_gpus: int = 0
    gpu_name: str = ""
    figures: dict[str, Any] = field(default_factory=dict)  # of the section that runs

    @property
    def preset(self) -> str:
        """The planner's preset of this card; empty if there is none."""
        card = find_card(self.gpu_name)
        return next((preset for name, preset in PRESETS.items() if CARDS[name] == card), "")

    def run(self, *words: str, ranks: int = 0, on_gpu: bool = True, timeout_s: float = SECTION_TIMEOUT_S) -> str:
        """Run a module and return what it printed. `ranks`: under torchrun. Raises CommandError."""
        module = list(words)
        if on_gpu and self.shadow:
            module = ["pipeline.extras.shadow", *(words[1:] if words[0] == "pipeline" else words)]
        launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}"] if ranks else []
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])  # a bundle is on PYTHONPATH
        environ = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1" if ranks else "4"}
        done = subprocess.run(
            [sys.executable, *launcher, "-m", *module],
            cwd=self.folder,
            env=environ,
            timeout=timeout_s,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if done.returncode:
            last = "\n".join(self._without_paths(done.stdout).strip().splitlines()[-12:])
            raise CommandError(f"`python -m {' '.join(words)}` ended with {done.returncode}:\n{last}")
        return done.stdout

    def _without_paths(self, text: str) -> str:
        """Reports are sent to others, so they name no folder of this machine."""
        for path, name in ((self.folder, "."), (ROOT, "."), (Path(sys.prefix), "venv"), (Path.home(), "~")):
            text = text.replace(str(path), name)
        return text

    def json(self, *words: str, **options: Any) -> dict[str, Any]:
        """Run a module that writes JSON to --output, and return that."""
        path = self.folder / "found.json"
        path.unlink(missing_ok=True)
        self.run(*words, "--output", str(path), **options)
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def train(self, name: str, *overrides: str, ranks: int = 0, on_gpu: bool = True, steps: int = 12) -> Path:
        """Train the quickstart on the small data set and return the run's folder."""
        hardware = "auto" if on_gpu else "cpu"
        words = [
            "experiment=quickstart",
            "data.path=data",
            f"run_dir=runs/{name}",
            f"hardware={hardware}",
            f"trainer.max_steps={steps}",
            "trainer.global_batch_size=2048",
            "trainer.log_every_steps=1",
            "planner.timeout_s=2",
            "logger.tensorboard=false",
            *overrides,
        ]
        self.run("pipeline", "train", *words, ranks=ranks, on_gpu=on_gpu)
        return self.folder / "runs" / name


def losses_of(run: Path) -> list[float]:
    """Return the training loss of each step, as the run logged it."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["logloss"] for line in lines if line["kind"] == "train"]


def difference(found: list[float], wanted: list[float]) -> float:
    """Return the largest relative difference; infinite if the lengths differ or nothing was found."""
    if len(found) != len(wanted) or not wanted:
        return float("inf")
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


def near(name: str, found: list[float], wanted: list[float], tolerance: float) -> Check:
    gap = difference(found, wanted)
    return Check(name, f"{gap:.1e} apart over {len(found)} steps", f"at most {tolerance:.0e}", gap <= tolerance)


def within(name: str, measured: float, predicted: float, factor: float, unit: str) -> Check:
    ratio = measured / predicted if predicted else float("inf")
    found = f"measured {measured:.4g} {unit}, predicted {predicted:.4g} {unit}: {ratio:.2f} times"
    return Check(name, found, f"within a factor of {factor:g}", 1 / factor <= ratio <= factor)


def doctor(machine: Machine) -> Iterator[Check]:
    try:
        said, passed = machine.run("pipeline", "doctor"), True
    except CommandError as error:
        said, passed = str(error), False
    yield Check("doctor", said.strip().splitlines()[-1] if passed else said, "all is well", passed)


def tests(machine: Machine) -> Iterator[Check]:
    """tests/gpu, on the real GPU if there is one."""
    path = machine.folder / "tests.xml"
    words = ["pytest", "-m", "gpu", str(ROOT / "tests/gpu"), "--rootdir", str(ROOT), f"--junitxml={path}", "-q"]
    workers = min(8, (os.cpu_count() or 1) // 2)
    words += ["-n", str(workers), "--dist", "worksteal"] if workers > 1 and not machine.shadow else []
    try:
        machine.run(*words, on_gpu=False, timeout_s=20 * 60)
    except CommandError:
        if not path.exists():
            raise
    suite = next(ElementTree.parse(path).getroot().iter("testsuite")).attrib
    bad = int(suite["failures"]) + int(suite["errors"])
    found = f"{suite['tests']} tests, {bad} failed, {suite['skipped']} skipped"
    yield Check("tests/gpu", found, "none failed", bad == 0 and int(suite["tests"]) > 0)
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        for kind in ("failure", "error"):
            if (fault := case.find(kind)) is not None:
                yield Check(case.attrib["name"], fault.attrib.get("message", "")[:300], "passes", False)


def same_losses(machine: Machine) -> Iterator[Check]:
    on_cpu = losses_of(machine.train("cpu", "sharding.fast_cpu=false", "comms.backend=gloo", on_gpu=False))
    yield near("loss of each step on the GPU and on the CPU", losses_of(machine.train("gpu")), on_cpu, SAME)
    found = machine.json("benchmarks.gpu_sides", "losses")
    text = "loss of each step in this trainer and in TorchRec's loop"
    yield near(text, found["ours"], found["torchrec"], SAME)


def resume(machine: Machine) -> Iterator[Check]:
    whole = machine.train("whole", steps=8)
    machine.train("parts", steps=4)
    parts = machine.train("parts", steps=8)
    found, wanted = tensors_of(parts), tensors_of(whole)
    different = sorted(name for name in wanted if found.get(name) != wanted[name])
    text = f"{len(wanted) - len(different)} of {len(wanted)} tensors equal"
    names = f", not {', '.join(different[:3])}" if different else ""
    yield Check("4 + 4 steps and 8 steps", text + names, "all bits equal", bool(wanted) and not different)


def tensors_of(run: Path) -> dict[str, str]:
    """Return the SHA-256 of each tensor in the run's last step."""
    import torch

    from pipeline.checkpoint.tensors import StepTensors

    step = max((run / "checkpoints").glob("step_*"))
    tensors = StepTensors(str(step))
    digests = {}
    for key in tensors.entries:
        shape = list(tensors.shape(key))
        bits = tensors.read(key, [0] * len(shape), shape).contiguous().flatten()
        digests[key] = hashlib.sha256(bits.view(torch.uint8).numpy().tobytes()).hexdigest()
    return digests


def precision(machine: Machine) -> Iterator[Check]:
    wanted = losses_of(machine.train("gpu"))
    for name, tolerance in (("tf32", TF32), ("bf16", HALF)):
        found = losses_of(machine.train(name, f"trainer.precision={name}"))
        yield near(f"losses in {name} and in fp32", found, wanted, tolerance)
    for kernel in ("fused_uvm", "fused_uvm_caching"):
        key = f"tables.default.sharding.compute_kernels=[{kernel}]"
        yield near(f"losses with {kernel} and with fused", losses_of(machine.train(kernel, key)), wanted, SAME)


def nccl(machine: Machine) -> Iterator[Check]:
    if machine.num_gpus < 2:
        yield Check("two ranks on NCCL", f"{machine.num_gpus} GPU", "2 GPUs or more", None)
        return
    wanted, kinds = losses_of(machine.train("gpu")), "tables.default.sharding.sharding_types"
    for kind in ("table_wise", "row_wise"):
        found = losses_of(machine.train(f"nccl_{kind}", f"{kinds}=[{kind}]", ranks=2))
        yield near(f"losses on two ranks, {kind}, and on one", found, wanted, SAME)
    for comms, tolerance in (("fp16", HALF), ("bf16", HALF), ("int8", INT8)):
        found = losses_of(machine.train(f"comms_{comms}", f"comms={comms}", f"{kinds}=[table_wise]", ranks=2))
        yield near(f"losses with comms={comms}", found, wanted, tolerance)


def speed(machine: Machine) -> Iterator[Check]:
    few = SHORT if machine.shadow else []
    for ranks in sorted({1, machine.num_gpus}):
        found = machine.json("benchmarks.gpu_sides", "speed", *few, ranks=ranks if ranks > 1 else 0)
        machine.figures[f"{ranks} rank(s)"] = found["presets"]
        for preset, figures in found["presets"].items():
            for side, ratio in (("ours", "ratio"), ("ours tf32", "ratio_tf32")):
                samples = figures["samples_per_s"][side]
                text = f"{samples:,.0f} samples/s, {figures[ratio]:.2f} times TorchRec's loop"
                passed = None if machine.shadow else figures[ratio] >= 1.0
                name = f"{preset} in {side.partition(' ')[2] or 'fp32'} on {ranks} rank(s)"
                yield Check(name, text, "at least 1 time", passed)
        if ranks == 1:
            yield from _steps(machine, found["presets"], few)


def _steps(machine: Machine, measured: dict[str, Any], few: list[str]) -> Iterator[Check]:
    """The planner's prediction of each step that was measured."""
    preset = "h100_80gb" if machine.shadow else machine.preset
    if not preset:
        yield Check("predicted steps", f"no preset for {machine.gpu_name}", "one of conf/hardware", None)
        return
    found = machine.json("benchmarks.gpu_sides", "predict", "--hardware", preset, *few, on_gpu=False)
    machine.figures["predicted_step_ms"] = found["step_ms"]
    sides = {"fp32": "ours", "tf32": "ours tf32", "bf16": "ours bf16"}
    for name, by_precision in found["step_ms"].items():
        for precision, step_ms in by_precision.items():
            measured_ms = measured[name]["ms_a_step"][sides[precision]]
            check = within(f"step of {name} in {precision}", measured_ms, step_ms, STEP_FACTOR, "ms")
            check.passed = None if machine.shadow else check.passed
            yield check


def memory(machine: Machine) -> Iterator[Check]:
    """The memory that the planner predicts for the preset of this card, compared with a run."""
    preset = "h100_80gb" if machine.shadow else machine.preset
    if not preset:
        yield Check("memory", f"no preset for {machine.gpu_name}", "one of conf/hardware", None)
        return
    run = machine.train("predicted", f"hardware={preset}", steps=40)
    summary = json.loads((run / "summary.json").read_text())
    from pipeline.planner.plan_record import read_view

    plan = read_view(str(run / "plan.json")).description
    predicted_gb = (max(load.hbm_bytes for load in plan.ranks) + plan.dense_bytes) / 2**30
    measured_gb = summary["throughput"]["peak_memory_gb"]
    machine.figures["memory_gb"] = {"measured": measured_gb, "predicted": predicted_gb}
    # The tables of this job are small, so what torch needs besides is most of the memory.
    text = f"measured {measured_gb:.3g} GiB, predicted {predicted_gb:.3g} GiB for tables and layers"
    yield Check("peak memory of the quickstart", text, "at least what was predicted", measured_gb >= predicted_gb)


SECTIONS: dict[str, tuple[str, Callable[[Machine], Iterator[Check]]]] = {
    "doctor": ("Installation", doctor),
    "losses": ("Losses compared with the CPU and with TorchRec's loop", same_losses),
    "resume": ("A resumed run compared with an uninterrupted one", resume),
    "precision": ("tf32, bf16, and tables in host memory", precision),
    "nccl": ("Several GPUs", nccl),
    "speed": ("Steps compared with TorchRec's loop and with the planner's predictions", speed),
    "memory": ("Memory that the planner predicts, compared with a run", memory),
    "tests": ("tests/gpu", tests),
}


def run_section(name: str, machine: Machine) -> Section:
    """Run the checks of one section; what it raises becomes its error."""
    title, checks = SECTIONS[name]
    section = Section(name, title)
    machine.figures = section.figures
    started = time.monotonic()
    try:
        for check in checks(machine):
            section.checks.append(check)
            mark = {True: "ok", False: "FAILED", None: "not tried"}[check.passed]
            print(f"{mark:<10}{check.name}: {check.found}", flush=True)
    except (CommandError, subprocess.TimeoutExpired, OSError, KeyError, StopIteration, ValueError) as error:
        section.error = f"{type(error).__name__}: {error}"
        print(f"FAILED    {name}: {section.error}", flush=True)
    section.seconds = time.monotonic() - started
    return section


def prepare_data(machine: Machine) -> None:
    """Generate and prepare 40,000 rows of the quickstart's data in the scratch folder."""
    rows = ["data.synthetic.num_rows=40000"]
    machine.run("pipeline", "generate", "data=quickstart", "output=rows.tsv", *rows, on_gpu=False)
    machine.run("pipeline", "prepare", "data=quickstart", "source=rows.tsv", "data.path=data", on_gpu=False)


def about(machine: Machine, facts: dict[str, Any]) -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    driver = ""
    if shutil.which("nvidia-smi") and not machine.shadow:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True).stdout.strip().splitlines()[0]
    date = datetime.now(UTC).isoformat(timespec="seconds")
    host = {"python": platform.python_version(), "cpus": os.cpu_count(), "kernel": platform.release()}
    return {"date": date, "commit": commit, "shadow": machine.shadow, "driver": driver, **host, **facts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu_report"), help="folder of the JSON and the page")
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--shadow", action="store_true", help="run on shadow GPUs")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(Path(folder), options.shadow)
        facts = machine.json("benchmarks.gpu_sides", "facts")
        if not facts["gpus"]:
            sys.exit("error: torch sees no GPU here; `python -m pipeline doctor` says why, --shadow needs none")
        machine.num_gpus, machine.gpu_name = len(facts["gpus"]), facts["gpus"][0]["name"]
        prepare_data(machine)
        sections: list[Section] = []
        for name in options.sections:  # written after each, so that a report that is stopped is not lost
            sections.append(run_section(name, machine))
            report = {"about": about(machine, facts), "sections": [asdict(section) for section in sections]}
            (options.output / "gpu_report.json").write_text(json.dumps(report, indent=1))
            (options.output / "gpu_report.html").write_text(render(report))
    print(f"written to {options.output}/gpu_report.json and {options.output}/gpu_report.html, which opens from disk")
    print("to send it: attach both files to an issue of the project; they hold no host name, user name or path")
    sys.exit(any(section.error or any(c.passed is False for c in section.checks) for section in sections))


if __name__ == "__main__":
    main()
