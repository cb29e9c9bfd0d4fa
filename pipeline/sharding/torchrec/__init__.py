"""Subclasses of TorchRec and FBGEMM classes, and replacements of their CPU paths."""
