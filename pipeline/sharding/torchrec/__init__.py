"""Subclasses of TorchRec and FBGEMM classes, and replacements of their CPU paths, for the versions that compat names."""

from pipeline.sharding.compat import check_versions

check_versions()
