"""What the processes of tests/gpu fork from: it gives itself shadow GPUs where there is no real one, then imports.

It starts no thread and no CUDA context, which a fork would lose.
"""

from __future__ import annotations

import os

from pipeline.extras import shadow

IS_REAL = os.environ.get("TESTS_GPU") == "real"
if not IS_REAL:
    shadow.activate(num_gpus=8)

import torch  # noqa: E402

import pipeline.extras.models.tasks.retrieval  # noqa: E402
import pipeline.extras.step_time.prediction  # noqa: E402
import pipeline.models.tasks.click  # noqa: E402
import pipeline.models.tasks.labels  # noqa: E402
import pipeline.training.evaluate  # noqa: E402
import pipeline.training.hooks.base  # noqa: E402
import pipeline.training.train  # noqa: E402
import pipeline.training.trainer  # noqa: E402, F401
import tests.gpu.jobs  # noqa: E402, F401
from pipeline.cli.command_line import load_config  # noqa: E402
from pipeline.config.jobs.train import TrainJob  # noqa: E402

torch.set_num_threads(1)
load_config(TrainJob, ["experiment=quickstart", "hardware=h100_80gb"])
