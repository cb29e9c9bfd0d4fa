"""Imports are not collected, and nothing else is kept from being so."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from pipeline.runtime.process.processes import none_while_importing


def test_nothing_is_collected_while_importing_and_what_was_imported_never_again() -> None:
    before = gc.get_freeze_count()
    sys.modules.pop("colorsys", None)
    with none_while_importing():
        assert not gc.isenabled()
        import colorsys  # noqa: F401
    assert gc.isenabled()
    assert gc.get_freeze_count() > before
    gc.unfreeze()


def test_nothing_is_set_aside_where_all_was_imported_before() -> None:
    before = gc.get_freeze_count()
    with none_while_importing():
        import json  # noqa: F401
    assert (gc.isenabled(), gc.get_freeze_count()) == (True, before)


def test_an_import_that_fails_leaves_the_collector_on() -> None:
    with pytest.raises(ModuleNotFoundError), none_while_importing():
        import no_such_module  # noqa: F401
    assert gc.isenabled()


def test_a_process_that_loaded_duckdb_while_importing_ends_without_a_word() -> None:
    """nanobind reports what it calls leaks: 48 lines at the end of each tick of retrain."""
    code = (
        "from pipeline.runtime.process.processes import none_while_importing\n"
        "with none_while_importing():\n    import duckdb\n"
        "connection = duckdb.connect()\nconnection.execute('select 1').fetchall()\nconnection.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
