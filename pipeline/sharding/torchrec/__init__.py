"""Subclass TorchRec and FBGEMM classes, and replace their CPU code, for the versions that compat.py
names.
"""

from pipeline.sharding.compat import check_versions

check_versions()
