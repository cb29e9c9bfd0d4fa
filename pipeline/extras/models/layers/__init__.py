"""Layers of the models of this extra, in plain PyTorch."""
