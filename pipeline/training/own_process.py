"""Undo what a training or an evaluation changes for its process, for a caller that goes on."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from tqdm import tqdm

from pipeline import devices
from pipeline.checkpoint.random_state import capture_random_state, restore_random_state
from pipeline.devices.process_group import leave
from pipeline.sharding.compat import forget_groups


@contextmanager
def own_torch_state() -> Iterator[None]:
    """Restore threads, random generators and the device, and leave a process group that was joined."""
    threads, had_group = torch.get_num_threads(), dist.is_initialized()
    monitor_every_s, tqdm.monitor_interval = tqdm.monitor_interval, 0  # a bar of a library would start a thread
    with devices.using(devices.current()):
        drawn = capture_random_state()
        try:
            yield
        finally:
            if dist.is_initialized() and not had_group:
                leave()
                forget_groups()
                gc.collect()  # sharded modules are cycles, and hold the group's threads
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            restore_random_state(drawn)
            tqdm.monitor_interval = monitor_every_s
