"""Train deep recommendation models on TorchRec: one verb a module, `python -m pipeline.<verb> key=value ...`."""

__version__ = "0.1.0"
