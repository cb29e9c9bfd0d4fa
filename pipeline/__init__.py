"""Train deep recommendation models on TorchRec: `python -m pipeline` lists the verbs, and docs/reference/python.md
the functions for notebooks and scripts."""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.runtime.nvml import BeforeFbgemm

if TYPE_CHECKING:
    from pipeline.cli.api.artifact import Artifact
    from pipeline.cli.api.calls import (
        compose,
        evaluate,
        export,
        generate,
        inspect,
        plan,
        predict,
        prepare,
        retrain_tick,
        train,
    )
    from pipeline.cli.api.dataset import Dataset
    from pipeline.cli.api.registry import Registry
    from pipeline.cli.api.runs import Run, Runs
    from pipeline.config.registry import register
    from pipeline.runtime.errors import UserError

__version__ = "1.0.0"
__all__ = [
    "Artifact", "Dataset", "Registry", "Run", "Runs", "UserError", "compose", "evaluate", "export", "generate", "inspect",
    "plan", "predict", "prepare", "register", "retrain_tick", "train",
]  # fmt: skip
# where the names that are not in pipeline/cli/api/calls.py are defined
_MODULES = {
    "Artifact": "pipeline.cli.api.artifact",
    "Dataset": "pipeline.cli.api.dataset",
    "Registry": "pipeline.cli.api.registry",
    "Run": "pipeline.cli.api.runs",
    "Runs": "pipeline.cli.api.runs",
    "UserError": "pipeline.runtime.errors",
    "register": "pipeline.config.registry",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is used: `import pipeline` alone imports neither torch nor Hydra."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES.get(name, "pipeline.cli.api.calls")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


sys.meta_path.insert(0, BeforeFbgemm())

# The form of earlier releases, `python -m pipeline train`: name the new one. Python imports this
# package before it looks for the module, and until it has found the module sys.argv begins with "-m".
if sys.argv[:1] == ["-m"] and "-m" in sys.orig_argv:
    _package, _, _verb = sys.orig_argv[sys.orig_argv.index("-m") + 1].partition(".")
    if _verb.isidentifier() and not any(Path(__file__).with_name(_verb + end).exists() for end in ("", ".py")):
        print(f"error: type `python -m pipeline {_verb}` instead of `python -m pipeline.{_verb}`", file=sys.stderr)
        sys.exit(2)
