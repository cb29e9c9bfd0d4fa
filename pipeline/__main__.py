"""List the verbs, and run one:  python -m pipeline train experiment=quickstart"""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

from pipeline.runtime.errors import did_you_mean

USER_ERROR = 2


def verbs() -> dict[str, str]:
    """Name -> what it does, the first line of its docstring: every module of pipeline/cli that has a main()."""
    found = {}
    for file in sorted((Path(__file__).parent / "cli").glob("*.py")):
        tree = ast.parse(file.read_text())
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            found[file.stem] = (ast.get_docstring(tree) or "").splitlines()[0].partition(":  ")[0]
    return found


def main(argv: list[str]) -> None:
    known = verbs()
    name = argv[0] if argv else "--help"
    if name in ("--help", "-h"):
        width = max(map(len, known))
        print("python -m pipeline <verb> key=value ...\n")
        print(*(f"  {verb:<{width}}  {line}" for verb, line in known.items()), sep="\n")
        print("\npython -m pipeline <verb> --help lists what it takes")
        return
    if name not in known:
        print(
            f"error: there is no verb {name!r}{did_you_mean(name, known)}; there are {', '.join(known)}",
            file=sys.stderr,
        )
        sys.exit(USER_ERROR)
    sys.argv = [f"pipeline {name}", *argv[1:]]
    importlib.import_module(f"pipeline.cli.{name}").main()


if __name__ == "__main__":
    main(sys.argv[1:])
