"""Train deep recommendation models on TorchRec: `python -m pipeline` lists the verbs."""

import sys
from pathlib import Path

from pipeline.runtime.nvml import BeforeFbgemm

__version__ = "1.0.0"

sys.meta_path.insert(0, BeforeFbgemm())

# The form of earlier releases, `python -m pipeline train`: name the new one. Python imports this
# package before it looks for the module, and until it has found the module sys.argv begins with "-m".
if sys.argv[:1] == ["-m"] and "-m" in sys.orig_argv:
    _package, _, _verb = sys.orig_argv[sys.orig_argv.index("-m") + 1].partition(".")
    if _verb.isidentifier() and not any(Path(__file__).with_name(_verb + end).exists() for end in ("", ".py")):
        print(f"error: type `python -m pipeline {_verb}` instead of `python -m pipeline.{_verb}`", file=sys.stderr)
        sys.exit(2)
