"""Subclass TorchRec's and FBGEMM's classes, for the versions that compat.py names."""

from pipeline.sharding.compat import check_versions

check_versions()
