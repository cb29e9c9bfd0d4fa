"""Save or load one rank's state in a process of its own and print how much memory that took:  python -m ... save|load FOLDER"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.runtime.process.distributed import DistributedContext

ROWS, DIM = [200_000, 400_000, 600_000], 32


class Tables(nn.Module):
    """Tables as FBGEMM holds them: each a part of one allocation."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.zeros(sum(ROWS) * DIM)
        begin = 0
        for index, rows in enumerate(ROWS):
            part = whole[begin : begin + rows * DIM].view(rows, DIM)
            self.register_buffer(f"table_{index}", part)
            begin += rows * DIM


def resident_bytes() -> int:
    """Without what is only mapped from files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


class Peak(threading.Thread):
    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.highest, self.is_over = resident_bytes(), False

    def run(self) -> None:
        while not self.is_over:
            self.highest = max(self.highest, resident_bytes())
            time.sleep(0.001)


def main(action: str, folder: str, asynchronous: str = "") -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    context = DistributedContext(0, 1, 0, 1, torch.device("cpu"), "gloo")
    before_state = resident_bytes()
    model = Tables()
    for buffer in model.buffers():
        buffer.fill_(1.0)
    state = resident_bytes() - before_state
    checkpointer = Checkpointer(folder, model, None, context, asynchronous=bool(asynchronous))
    before, peak = resident_bytes(), Peak()
    peak.start()
    if action == "save":
        checkpointer.save(1)
        checkpointer.wait()
    else:
        checkpointer.restore_latest()
    peak.is_over = True
    peak.join()
    largest = max(buffer.nbytes for buffer in model.buffers())
    print(json.dumps({"local": state, "largest": largest, "peak": state + peak.highest - before}))


if __name__ == "__main__":
    main(*sys.argv[1:])
