"""What processes of tests import, load and compose, all at once: see tests.support.forks.

It starts no thread, which a fork would lose.
"""

from __future__ import annotations

import numba  # noqa: F401
import scipy.linalg  # noqa: F401  # Numba imports it when it loads a kernel
import torch

import pipeline.devices.cpu.kernels.dots
import pipeline.devices.cpu.kernels.lookup
import pipeline.devices.cpu.kernels.update
import pipeline.models.tasks.click
import pipeline.runtime.process.agent
import pipeline.serving.artifact.export
import pipeline.training.evaluate
import pipeline.training.train  # noqa: F401  # and all of the above
import tests.support.sharded_models  # noqa: F401
from pipeline.cli.command_line import load_config
from pipeline.config.jobs.evaluate import EvaluateJob
from pipeline.config.jobs.train import TrainJob
from pipeline.extras.precompile.cli import precompile

torch.set_num_threads(1)
for compile_kernels in (precompile._tables, precompile._replicated_tables, precompile._dot_products):
    compile_kernels()
load_config(TrainJob, ["experiment=quickstart", "hardware=cpu"])  # the options that most tests choose are composed once
load_config(EvaluateJob, ["run=none"])
