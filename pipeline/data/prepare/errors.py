"""Say in the job's own words what DuckDB lacked."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

import duckdb

from pipeline.data.prepare.resources import Resources
from pipeline.runtime.errors import LimitError


@contextmanager
def engine_errors(resources: Resources) -> Iterator[None]:
    """DuckDB's lack of memory as a LimitError that says what to raise, and a full disk as the OSError that it is."""
    try:
        yield
    except duckdb.OutOfMemoryException as error:
        raise LimitError(
            f"memory_limit_gb={resources.memory_bytes / 2**30:g} is too little for {resources.threads} threads "
            f"(DuckDB: {str(error).splitlines()[0]}): raise it, or lower threads"
        ) from error
    except duckdb.IOException as error:
        text = " ".join(str(error).split())
        code = errno.ENOSPC if "No space left" in text or "max_temp_directory_size" in text else errno.EIO
        raise OSError(code, f"{os.strerror(code)} (DuckDB: {text[:200]})", resources.staging) from error
