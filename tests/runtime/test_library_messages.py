"""A user sees warnings about a line of the user's own code, and no message of a library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import logging, sys, warnings
import numpy as np
from pipeline.data.quality import probabilities
from pipeline.runtime.logs import configure_logging, quiet_libraries

def warn_everywhere():
    warnings.warn_explicit("of numpy", RuntimeWarning, np.__file__, 1)
    warnings.warn_explicit("of torch's C++", UserWarning, "no_such_file.cpp", 1)
    logging.getLogger("torchrec.distributed.utils").warning("of a logger")
    logging.getLogger().warning("Sharding spec not found for cat_1")
    warnings.warn("of my plugin")

if sys.argv[1] == "command":
    configure_logging()
    warn_everywhere()
else:
    with quiet_libraries():
        warn_everywhere()
assert probabilities(np.array([-2000.0, 0.0, 2000.0])).tolist() == [0.0, 0.5, 1.0]
"""


def test_only_warnings_about_the_users_own_code_are_shown(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT)
    for how in ("command", "python"):
        done = subprocess.run([sys.executable, script, how], capture_output=True, text=True, check=True)
        assert "UserWarning: of my plugin" in done.stderr
        assert done.stderr.count("\n") == 2 and str(script) in done.stderr, done.stderr
