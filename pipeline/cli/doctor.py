"""Check whether this machine can train, and what fixes it if not:  python -m pipeline.doctor

Needs nothing but Python itself: what is missing or broken is what it is here to find.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pipeline.runtime.process.stdout import write_out
from pipeline.sharding.compat import WRITTEN_FOR  # of the standard library alone, as all this file

# torch -> (torchrec, fbgemm): releases that were made for each other. Another pair shows as `undefined symbol`, or as
# `operator ... does not exist` (pytorch/torchrec#551, #770, #2857).
RELEASED_TOGETHER = {"2.14": ("1.9", "1.9"), "2.13": ("1.8", "1.8"), "2.12": ("1.7", "1.7"), "2.11": ("1.6", "1.6")}
TESTED = WRITTEN_FOR["torch"]  # the one that this release's tests run on; training refuses others
FBGEMM = ("fbgemm-gpu-cpu", "fbgemm-gpu")
MODULES = {  # import name -> distribution
    "hydra": "hydra-core", "iopath": "iopath", "torchx": "torchx", "yaml": "PyYAML", "numpy": "numpy", "rich": "rich",
    "pyarrow": "pyarrow", "duckdb": "duckdb", "tensorboard": "tensorboard", "tensordict": "tensordict",
    "torchmetrics": "torchmetrics", "tqdm": "tqdm", "pyre_extensions": "pyre-extensions",
}  # fmt: skip
LEAST_SHM_BYTES = 512 << 20  # Docker's default is 64 MiB; NCCL and pinned batches need more
LEAST_DISK_BYTES = 5 << 30
PROBE_TIMEOUT_S = 60
PROBE_PATH = [str(Path(__file__).parents[2])]  # so that a probe imports this very package, from any folder
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One line of the report; `fix` is the command for what failed, empty where all is well."""

    name: str
    found: str
    fix: str = ""


def diagnose() -> list[Finding]:
    """All findings, in the order of the report. Takes seconds: the probes run at the same time."""
    gpus = _nvidia_gpus()
    probes = ["lookup_cpu", "all_to_all_gloo"] + (["gpus", "lookup_cuda", "all_to_all_nccl"] if gpus else [])
    with ThreadPoolExecutor(len(probes)) as pool:
        probed = [pool.submit(probe, name, bool(gpus)) for name in probes]
        findings = [_python(), *_stack(bool(gpus)), _modules(bool(gpus))]
        findings += [future.result() for future in probed]
    if not gpus:
        findings.append(Finding("GPU", "none found: trains on CPU"))
    return [*findings, _shared_memory(), _disk(), _cores()]


def stack_command(gpu: bool) -> str:
    """The command that installs the tested set."""
    torch = TESTED
    torchrec, fbgemm = RELEASED_TOGETHER[torch]
    package = "fbgemm-gpu" if gpu else "fbgemm-gpu-cpu"
    return f"pip install torch=={torch}.0 {package}=={fbgemm}.0 && pip install --no-deps torchrec=={torchrec}.0"


def _python() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    return Finding("Python", found, "" if sys.version_info >= (3, 11) else "make PYTHON=python3.11 install")


def _stack(gpu: bool) -> list[Finding]:
    """torch, torchrec and fbgemm: there, and a set that was tested together."""
    torch, torchrec = _version("torch"), _version("torchrec")
    fbgemms = {name: found for name in FBGEMM if (found := _version(name))}
    fix = stack_command(gpu)
    findings = [Finding(name, found or "missing", "" if found else fix) for name, found in
                (("torch", torch), ("torchrec", torchrec))]  # fmt: skip
    if len(fbgemms) > 1:
        both = ", ".join(f"{name} {found}" for name, found in fbgemms.items())
        return [*findings, Finding("fbgemm", f"both {both}", f"pip uninstall -y {' '.join(FBGEMM)} && {fix}")]
    name, fbgemm = next(iter(fbgemms.items()), ("", ""))
    findings.append(Finding("fbgemm", f"{name} {fbgemm}" if fbgemm else "missing", "" if fbgemm else fix))
    if torch and torchrec and fbgemm:
        together = f"torch {_minor(torch)}, torchrec {_minor(torchrec)}, fbgemm {_minor(fbgemm)}"
        if RELEASED_TOGETHER.get(_minor(torch)) != (_minor(torchrec), _minor(fbgemm)):
            findings.append(Finding("tested set", f"{together} are not made for each other", fix))
        elif _minor(torch) != TESTED:
            findings.append(
                Finding("tested set", f"{together}, but this release was tested on torch {TESTED} alone", fix)
            )
        else:
            findings.append(Finding("tested set", together))
    return findings


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _minor(found: str) -> str:
    return ".".join(found.split("+")[0].split(".")[:2])


def _modules(gpu: bool) -> Finding:
    missing = [distribution for module, distribution in MODULES.items() if importlib.util.find_spec(module) is None]
    if not missing:
        return Finding("libraries", f"all {len(MODULES)} found")
    checkout = (Path(__file__).parents[2] / "setup.cfg").is_file()
    extra = "gpu" if gpu else "cpu"
    source = f"-e '.[{extra}]'" if checkout else f"'torchrec-pipeline[{extra}]'"
    return Finding("libraries", f"missing: {', '.join(missing)}", f"pip install {source}")


def probe(name: str, gpu: bool) -> Finding:
    """Run one of pipeline.cli.doctor_probes in a process of its own; a crash or a hang is a finding too."""
    command = [sys.executable, "-W", "ignore", "-m", "pipeline.cli.doctor_probes", name]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([*PROBE_PATH, os.environ.get("PYTHONPATH", "")]).rstrip(":")}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, env=environ, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return Finding(name, f"no answer within {PROBE_TIMEOUT_S} s", _probe_mend(name, gpu))
    if done.returncode == 0:
        return Finding(name, _last_line(done.stdout))
    if done.returncode < 0:
        return Finding(name, f"crashed with {signal.Signals(-done.returncode).name}", _probe_mend(name, gpu))
    reason = _last_line(done.stderr) or f"exit code {done.returncode}"
    return Finding(name, reason, stack_command(gpu) if "No module named" in reason else _probe_mend(name, gpu))


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _probe_mend(name: str, gpu: bool) -> str:
    if name == "all_to_all_gloo":
        return "GLOO_SOCKET_IFNAME=lo python -m pipeline.cli.doctor_probes all_to_all_gloo"
    if name == "all_to_all_nccl":
        return "NCCL_DEBUG=INFO python -m pipeline.cli.doctor_probes all_to_all_nccl"
    return stack_command(gpu)


def _nvidia_gpus() -> list[str]:
    """One line a GPU that the driver lists; torch is not asked, for it may be the one that is broken."""
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return [line for line in listed.stdout.splitlines() if line.startswith("GPU ")]


def _shared_memory() -> Finding:
    shm = Path("/dev/shm")
    if not shm.is_dir():
        return Finding("shared memory", "no /dev/shm", "mount -t tmpfs -o size=8G tmpfs /dev/shm")
    free = shutil.disk_usage(shm).free
    fix = "" if free >= LEAST_SHM_BYTES else "mount -o remount,size=8G /dev/shm  (docker run --shm-size=8g ...)"
    return Finding("shared memory", f"{free / GIB:.2f} GiB free in /dev/shm", fix)


def _disk() -> Finding:
    free = shutil.disk_usage(".").free
    fix = "" if free >= LEAST_DISK_BYTES else "cd <a folder on a larger disk>, or set data.path and run_dir"
    return Finding("disk", f"{free / GIB:.1f} GiB free in {os.getcwd()}", fix)


def _cores() -> Finding:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Finding("cores and memory", f"{len(os.sched_getaffinity(0))} cores, {memory / GIB:.1f} GiB")


def report(findings: list[Finding]) -> str:
    """A plain table, then a command for each failure; doctor must be readable where rich is missing."""
    width = max(len(finding.name) for finding in findings)
    lines = [
        f"{'FAIL' if finding.fix else 'ok':<5} {finding.name:<{width}}  {finding.found[:160]}" for finding in findings
    ]
    failed = [finding for finding in findings if finding.fix]
    lines += ["", "all is well: make train" if not failed else "fix it with:"]
    # The same command may fix several findings.
    lines += [f"  {command}" for command in dict.fromkeys(finding.fix for finding in failed)]
    return "\n".join(lines)


def main() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        write_out((__doc__ or "").strip())
        return
    if sys.argv[1:]:
        print(f"error: doctor takes no words: {' '.join(sys.argv[1:])}", file=sys.stderr)
        sys.exit(2)
    findings = diagnose()
    write_out(report(findings))
    sys.exit(1 if any(finding.fix for finding in findings) else 0)


if __name__ == "__main__":
    main()
