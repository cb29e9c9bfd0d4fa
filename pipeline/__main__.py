"""Run a verb, or list them:  python -m pipeline train experiment=quickstart"""

from __future__ import annotations

import sys

from pipeline.cli import interrupt  # noqa: F401  first, because it handles Ctrl-C during the next imports
from pipeline.cli.verbs import find_verb, list_verbs
from pipeline.runtime.errors import UserError
from pipeline.runtime.process.ending import run_to_exit
from pipeline.runtime.process.exit_codes import USER_ERROR
from pipeline.runtime.process.stdout import write_out

FIRST_STEPS = (
    "\nA first model, in this order:",
    "  python -m pipeline generate data=quickstart",
    "  python -m pipeline prepare data=quickstart source=datasets/raw/quickstart.tsv",
    "  python -m pipeline train experiment=quickstart",
    "  python -m pipeline evaluate run=runs/quickstart",
    "For rows of your own: python -m pipeline inspect source=<file>",
    "\npython -m pipeline <verb> --help lists what a verb takes",
)


def main(argv: list[str] | None = None) -> None:
    """Run `argv` (sys.argv). An unknown verb, or a plugin without a module, is exit code 2."""
    name, *words = (sys.argv[1:] if argv is None else argv) or ["--help"]
    given = [word.partition("=")[2].strip("[]") for word in words if word.startswith("plugins=")]
    plugins = [package.strip() for names in given for package in names.split(",") if package.strip()]
    try:
        if name in ("--help", "-h"):
            known = list_verbs(plugins)
            width = max(map(len, known))
            listed = [f"  {verb:<{width}}  {line}" for verb, line in known.items()]
            write_out("\n".join(["python -m pipeline <verb> key=value ...\n", *listed, *FIRST_STEPS]))
            return
        run = find_verb(name, plugins)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)
    sys.argv = [f"pipeline {name}", *words]
    run()


def run_command() -> None:
    """Run `main` as a process of its own."""
    run_to_exit(main)


if __name__ == "__main__":
    run_command()
