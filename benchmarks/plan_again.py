"""Measure how long the ranks of a job that goes on wait for its plan, beside a search for it:

    python -m benchmarks.plan_again [--experiment mlperf_dlrmv2] [--hardware h100_80gb] [--ranks 16] [--timeout-s 60] [--rounds 3]

A search is what rank 0 does at a run's first start, while the others wait; at a resume, a requeue and a restart it reads
run_dir/plan.json and holds it against the job. Both are one call of the same function on the job's tables, resolved and
built on the meta device before. Seconds by the clock, and CPU-seconds, which a busy machine moves less.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.train import PlanJob
from pipeline.planner.plan_codec import write_plan
from pipeline.planner.plan_record import PlanRecord
from pipeline.planner.planner import make_plan
from pipeline.training.plan_job import build_request, resolve


def timed(what: str, make: Callable[[], PlanRecord]) -> PlanRecord:
    clock, cpu = time.monotonic(), time.process_time()
    record = make()
    print(f"{what:<24}{time.monotonic() - clock:>8.2f} s   cpu {time.process_time() - cpu:>6.2f} s", flush=True)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", default="mlperf_dlrmv2")
    parser.add_argument("--hardware", default="h100_80gb")
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--timeout-s", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    words = [f"experiment={options.experiment}", f"hardware={options.hardware}", f"world_size={options.ranks}"]
    job = load_config(PlanJob, [*words, f"planner.timeout_s={options.timeout_s}"])
    request = build_request(resolve(job))
    print(f"{options.experiment}, {len(request.tables)} tables, {options.ranks} ranks of {options.hardware}")
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "plan.json")
        record = timed("search", lambda: make_plan(job.planner, request))
        write_plan(path, record)
        for _ in range(options.rounds):
            again = timed("from the run's plan", lambda: make_plan(job.planner, request, path))
            if again != record:
                raise RuntimeError("the plan of the file is another one")


if __name__ == "__main__":
    main()
