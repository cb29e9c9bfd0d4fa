"""List the verbs, and run one:  python -m pipeline train experiment=quickstart"""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

from pipeline.config.registry import components, load_plugins
from pipeline.runtime.errors import ConfigError, UserError, did_you_mean
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


def verbs(plugins: list[str]) -> dict[str, str]:
    """Name -> what it does: modules of pipeline/cli and of extras that have a main, then installed packages and plugins."""
    found = {}
    for file in _verb_files():
        tree = ast.parse(file.read_text())
        if "main" in {name for node in tree.body for name in _defined(node)}:
            found[file.stem] = _first_sentence(ast.get_docstring(tree))
    load_plugins(plugins)
    for name, main_of in components("verb").items():
        found.setdefault(name, _first_sentence(main_of.verb.doc))
    return found


def _verb_files() -> list[Path]:
    """pipeline/cli/<verb>.py, then pipeline/extras/<extra>/cli/<verb>.py."""
    root = Path(__file__).parent
    return [*sorted((root / "cli").glob("*.py")), *sorted(root.glob("extras/*/cli/*.py"))]


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef):
        return [node.name]
    return (
        [target.id for target in node.targets if isinstance(target, ast.Name)] if isinstance(node, ast.Assign) else []
    )


def _first_sentence(doc: str | None) -> str:
    return (doc or "").strip().partition("\n")[0].partition(":  ")[0]


def module_of(verb: str) -> str | None:
    """The module that defines a verb of this package or of its extras."""
    root = Path(__file__).parent
    found = next((file for file in _verb_files() if file.stem == verb), None)
    return None if found is None else ".".join(["pipeline", *found.relative_to(root).with_suffix("").parts])


def run(name: str) -> None:
    module = module_of(name)
    main_of = importlib.import_module(module).main if module else components("verb")[name]
    main_of()


def main(argv: list[str]) -> None:
    """Ends the process with exit code 2 for an unknown verb, or a plugin that cannot be imported."""
    plugins = [word.partition("=")[2].strip("[]") for word in argv if word.startswith("plugins=")]
    name = argv[0] if argv else "--help"
    try:
        known = verbs([package.strip() for names in plugins for package in names.split(",") if package.strip()])
        if name not in ("--help", "-h") and name not in known:
            raise ConfigError(f"there is no verb {name!r}{did_you_mean(name, known)}; there are {', '.join(known)}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)
    if name in known:
        sys.argv = [f"pipeline {name}", *argv[1:]]
        run(name)
        return
    width = max(map(len, known))
    listed = [f"  {verb:<{width}}  {line}" for verb, line in known.items()]
    write_out("\n".join(["python -m pipeline <verb> key=value ...\n", *listed, *FIRST_STEPS]))


if __name__ == "__main__":
    main(sys.argv[1:])
