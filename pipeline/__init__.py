"""Train deep recommendation models on TorchRec: `python -m pipeline` lists the verbs."""

__version__ = "0.1.0"
