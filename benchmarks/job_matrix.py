"""Train a matrix of small jobs in one checkout, and compare their numbers with those of another checkout:

    python -m benchmarks.job_matrix --output before.json [--tree PATH]
    python -m benchmarks.job_matrix --output after.json --compare before.json

A refactoring must not change a bit. Each job is the command that a user would type, run by the `.venv` of the tree. The
output holds, of each job, its validation metrics and a SHA-256 of each tensor of its last checkpoint; of the export,
the scores of its certificate.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

DATA = {
    "quickstart": ["data=quickstart", "data.synthetic.num_rows=60000"],
    "histories": ["data=histories"],
    "conversions": ["data=conversions"],
}
SHORT = [
    "trainer.max_steps=40",
    "trainer.global_batch_size=512",
    "trainer.evaluate_max_batches=4",
    "hardware=cpu",
    "planner.timeout_s=2",
    "logger.report=false",
    "logger.tensorboard=false",
]
# Name -> the data, the number of ranks, and what is added to SHORT.
JOBS: dict[str, tuple[str, int, list[str]]] = {
    "quickstart": ("quickstart", 1, ["experiment=quickstart"]),
    "quickstart_2_ranks": ("quickstart", 2, ["experiment=quickstart"]),
    "bf16": ("quickstart", 1, ["experiment=quickstart", "trainer.precision=bf16"]),
    "plain_torchrec": ("quickstart", 2, ["experiment=quickstart", "sharding.fast_cpu=false"]),
    "quotient_remainder": (
        "quickstart",
        1,
        ["experiment=quickstart", "tables.default.compression={kind: quotient_remainder, min_rows: 500}"],
    ),
    "frequency_split": (
        "quickstart",
        2,
        ["experiment=quickstart", "tables.default.compression={kind: frequency_split, head_rows: 100, min_rows: 500}"],
    ),
    "sequences": ("histories", 1, ["experiment=histories_din"]),
    "several_labels": ("conversions", 2, ["experiment=conversions_mmoe"]),
    "tiers": ("quickstart", 1, ["experiment=quickstart", "tables.default.tiers={slots: 0.5, min_rows: 500}"]),
}
DIGEST = """
import hashlib, json, sys
from pathlib import Path
from tests.support.stored_tensors import step_tensors
run = Path(sys.argv[1])
step = json.loads((run / "summary.json").read_text())["step"]
print(json.dumps({k: hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest() for k, t in step_tensors(run, step).items()}))
"""


def _call(tree: Path, words: list[str], ranks: int = 1) -> str:
    python = str(tree / ".venv" / "bin" / "python")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    done = subprocess.run([python, *launcher, *words], cwd=tree, env=environ, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        )
    return done.stdout


def _prepared(tree: Path, folder: Path, name: str) -> Path:
    raw, prepared = folder / f"{name}.raw", folder / name
    _call(tree, ["-m", "pipeline", "generate", *DATA[name], f"output={raw}"])
    [source] = [raw] if raw.is_file() else sorted(raw.iterdir())[:1]
    _call(tree, ["-m", "pipeline", "prepare", *DATA[name], f"source={source}", f"data.path={prepared}"])
    return prepared


def _results(tree: Path, folder: Path, jobs: list[str]) -> dict[str, Any]:
    prepared: dict[str, Path] = {}
    found: dict[str, Any] = {}
    for name in jobs:
        data, ranks, words = JOBS[name]
        path = prepared.setdefault(data, prepared.get(data) or _prepared(tree, folder, data))
        run = folder / "runs" / name
        given = [*words, *SHORT, f"data.path={path}", f"run_dir={run}"]
        _call(tree, ["-m", "pipeline", "train", *given], ranks)
        tensors = json.loads(_call(tree, ["-c", DIGEST, str(run)]).splitlines()[-1])
        summary = json.loads((run / "summary.json").read_text())
        found[name] = {"validation": summary["validation"], "tensors": tensors}
        print(f"{name}: {len(tensors)} tensors, {summary['validation']}", flush=True)
    if "quickstart" in found:
        artifact = folder / "artifact"
        _call(
            tree,
            [
                "-m",
                "pipeline",
                "export",
                f"run={folder / 'runs' / 'quickstart'}",
                "precision=int8",
                f"output={artifact}",
            ],
        )
        certificate = json.loads((artifact / "manifest.json").read_text())["certificate"]
        found["export_int8"] = {"validation": certificate["splits"], "tensors": {}}
    return found


def _differences(before: dict[str, Any], after: dict[str, Any]) -> int:
    count = 0
    for name in before:
        then, now = before[name], after.get(name)
        if now is None:
            continue
        changed = [key for key in then["tensors"] if then["tensors"][key] != now["tensors"].get(key)]
        same_metrics = then["validation"] == now["validation"]
        count += bool(changed) or not same_metrics
        print(
            f"{name}: {len(then['tensors']) - len(changed)} of {len(then['tensors'])} tensors equal, "
            f"metrics {'equal' if same_metrics else 'differ'}"
        )
        if not same_metrics:
            print(f"  before {then['validation']}\n  after  {now['validation']}")
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--jobs", nargs="*", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--compare", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = _results(options.tree.resolve(), Path(folder), options.jobs)
    options.output.write_text(json.dumps(results, indent=1))
    if options.compare:
        sys.exit(1 if _differences(json.loads(options.compare.read_text()), results) else 0)


if __name__ == "__main__":
    main()
