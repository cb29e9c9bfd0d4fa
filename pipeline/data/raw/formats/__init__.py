"""Raw formats, one file each.

Composing a job imports these modules, so they import pyarrow only inside methods.
"""
