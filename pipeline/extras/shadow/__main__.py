"""Run a verb of the pipeline on shadow GPUs:  python -m pipeline.extras.shadow train
experiment=quickstart

Any other module:  python -m pipeline.extras.shadow benchmarks.gpu_sides losses --output losses.json
On several ranks:  torchrun --nproc_per_node 2 -m pipeline.extras.shadow train experiment=quickstart
SHADOW_GPU_CARD is the card (h100_80gb), SHADOW_GPU_REPORT a folder for rank<r>.json with all
counts.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

from pipeline.extras import shadow
from pipeline.runtime.errors import UserError
from pipeline.runtime.process.exit_codes import USER_ERROR


def main(argv: list[str]) -> None:
    try:
        num_gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        shadow.activate(num_gpus, name=os.environ.get("SHADOW_GPU_CARD", "h100_80gb"))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)
    if argv == ["--patches"]:
        print("\n".join(map(str, shadow.patch_list())))
        return
    from pipeline.__main__ import main as run_verb

    rank = int(os.environ.get("RANK", "0"))
    with shadow.running(rank) as report:
        try:
            if argv and "." in argv[0]:
                sys.argv = argv
                runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
            else:
                run_verb(argv)
        finally:
            print(report.summary(), file=sys.stderr)
            for problem in report.problems:
                print(f"  {problem.kind} at {problem.place} ({problem.count}x): {problem.text}", file=sys.stderr)
            if folder := os.environ.get("SHADOW_GPU_REPORT"):
                Path(folder).mkdir(parents=True, exist_ok=True)
                Path(folder, f"rank{rank}.json").write_text(json.dumps(report.as_record(), indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
