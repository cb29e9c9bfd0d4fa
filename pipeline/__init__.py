"""Train deep recommendation models on TorchRec: `python -m pipeline` lists the verbs."""

import sys

from pipeline.runtime.nvml import BeforeFbgemm

__version__ = "0.1.0"

sys.meta_path.insert(0, BeforeFbgemm())
