"""The structure of the package, counted on its imports, and the rules of style that a script can hold.

python -m tests.test_house        prints the counts, and each arrow between rooms
"""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from tests.support.sources import nodes_of

REPOSITORY = Path(__file__).resolve().parents[1]
TOP_DOWN = [
    "launch", "cli", "retraining", "serving", "training", "models", "sharding", "planner", "checkpoint", "embeddings",
    "data", "devices", "config", "runtime",
]  # fmt: skip
BESIDE_EACH_OTHER = {"checkpoint", "embeddings"}
MOST_ROOMS, MOST_FLOORS, MOST_ARROWS = 14, 11, 64  # launch is one of them, and has three arrows
MOST_LINES_OF_A_FUNCTION = 60
MOST_PARAMETERS = 10


@cache
def modules() -> dict[str, Path]:
    files = [file for top in ("pipeline", "launch") for file in (REPOSITORY / top).rglob("*.py")]
    return {".".join(file.relative_to(REPOSITORY).with_suffix("").parts): file for file in files}


def room_of(module: str) -> str | None:
    """None for the package itself, the aliases of verbs at its top, and extras, which no room imports (lint-imports)."""
    parts = module.split(".")
    if parts[:2] == ["pipeline", "extras"]:
        return None
    if parts[0] == "launch":
        return "launch"
    return (
        parts[1]
        if parts[0] == "pipeline" and len(parts) > 1 and (REPOSITORY / "pipeline" / parts[1]).is_dir()
        else None
    )


@cache
def imported(file: Path) -> list[str]:
    """Full names of what a file imports, in functions too; what only a type checker imports does not count."""
    for_types = {
        inner
        for node in nodes_of(file)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    names: list[str] = []
    for node in nodes_of(file):
        if node in for_types:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return names


@cache
def arrows() -> Counter[tuple[str, str]]:
    """(room, room that it imports) -> number of modules that do."""
    counted: Counter[tuple[str, str]] = Counter()
    for module, file in modules().items():
        source = room_of(module)
        targets = {room_of(name) for name in imported(file)} - {source, None}
        counted.update((source, target) for target in targets if source and target)
    return counted


def floors() -> int:
    """The length of the longest chain of rooms, each importing the next."""
    below: dict[str, set[str]] = {room: set() for room in TOP_DOWN}
    for source, target in arrows():
        below[source].add(target)
    height: dict[str, int] = {}
    for room in TopologicalSorter(below).static_order():
        height[room] = 1 + max((height[other] for other in below[room]), default=0)
    return max(height.values())


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef, list[str]]]:
    """(place, definition, lines of its file) of every function of the package."""
    for module, file in modules().items():
        lines = file.read_text().splitlines()
        for node in nodes_of(file):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{module}:{node.lineno} {node.name}", node, lines


def test_a_room_imports_only_rooms_below_it() -> None:
    upward = [
        (source, target)
        for source, target in arrows()
        if TOP_DOWN.index(target) < TOP_DOWN.index(source) or {source, target} == BESIDE_EACH_OTHER
    ]
    assert upward == []


def test_the_house_stays_small_enough_to_be_learnt() -> None:
    rooms = {room for module in modules() if (room := room_of(module))}
    assert rooms == set(TOP_DOWN) and len(rooms) <= MOST_ROOMS
    assert len(arrows()) <= MOST_ARROWS
    assert floors() <= MOST_FLOORS


def test_no_docstring_reads_as_a_riddle() -> None:
    """ "Turn X into Y" stood above 208 of 268 modules and told a newcomer nothing."""
    found = []
    for module, file in modules().items():
        for node in nodes_of(file):
            documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if documented and (ast.get_docstring(node) or "").startswith("Turn "):
                found.append(f"{module}: {getattr(node, 'name', 'module')}")
    assert found == []


def test_functions_are_short() -> None:
    long = [
        f"{place}: {lines} lines"
        for place, node, _ in functions()
        if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > MOST_LINES_OF_A_FUNCTION
    ]
    assert long == []


def test_a_long_signature_says_why() -> None:
    """A comment above the function, at its head or on its first lines says why it takes so many parameters."""
    unexplained = []
    for place, node, lines in functions():
        arguments = node.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        num_parameters = len([argument for argument in named if argument.arg not in ("self", "cls")])
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        around = lines[max(0, first - 3) : node.body[0].lineno + 2]
        if num_parameters > MOST_PARAMETERS and not any("# " in line for line in around):
            unexplained.append(f"{place}: {num_parameters}")
    assert unexplained == []


# Parameters and results of public functions that have no type, and why.
UNTYPED = {
    "prediction": "what a task's forward gives is the task's own",
    "outputs": "what a model's forward gives is the model's own",
    "compose ->": "the overloads state the job of each verb",
    "closure": "torch's signature of Optimizer.step",
    "job": "a dataclass of any verb, a plugin's too",
    "values": "anything that JSON holds",
    "value": "anything that JSON holds",
    "data": "anything with the buffer protocol",
    "buffer": "anything with the buffer protocol",
    "cfg": "TorchX's signature of a scheduler",
    "client": "TorchX's signature of a scheduler",
    "docker_client": "TorchX's signature of a scheduler",
    "default": "of an option of any type",
    "graph_module": "torch.fx and torch.export give GraphModules under several names",
    "kind": "a dataclass that is known when it runs",
    "option ->": "dataclasses.field says Any too",
    "find ->": "a component of any kind",
    "find_metric ->": "config does not import the models' base class",
    "from_extra ->": "a function of any signature",
    "if_installed ->": "a function of any signature",
    "options ->": "a compression kind's own settings",
    "decode ->": "of the given kind",
}


def test_any_stands_on_no_public_seam_without_a_reason() -> None:
    found = []
    for place, node, _ in functions():
        if node.name.startswith("_") and node.name != "__init__":
            continue
        if place.startswith("pipeline.extras.shadow."):  # stands for functions of torch, which take anything
            continue
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        names = [argument.arg for argument in arguments if _is_any(argument.annotation)]
        names += [f"{node.name} ->"] if _is_any(node.returns) else []
        found += [f"{place}: {name}" for name in names if name not in UNTYPED and not _is_private(place)]
    assert found == []


def _is_any(annotation: ast.expr | None) -> bool:
    return isinstance(annotation, ast.Name) and annotation.id == "Any"


def _is_private(place: str) -> bool:
    """Of a class with an underscore, or inside a function: nobody else calls it."""
    module, _, rest = place.partition(":")
    line = int(rest.split()[0])
    around = [
        node
        for node in nodes_of(modules()[module])
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.lineno < line <= (node.end_lineno or 0)
    ]
    return any(not isinstance(node, ast.ClassDef) or node.name.startswith("_") for node in around)


def main() -> None:
    counted = arrows()
    rooms = {room for module in modules() if (room := room_of(module))}
    print(f"{len(rooms)} rooms, {floors()} floors, {len(counted)} arrows, {len(modules())} modules")
    for source, group in itertools.groupby(
        sorted(counted, key=lambda pair: TOP_DOWN.index(pair[0])), lambda pair: pair[0]
    ):
        print(f"  {source:<11}", *(f"{target}({counted[source, target]})" for _, target in group))


if __name__ == "__main__":
    main()


def test_the_reading_path_has_eight_files_and_each_is_used_by_an_earlier_one() -> None:
    text = (REPOSITORY / "ARCHITECTURE.md").read_text().partition("## Reading path")[2].partition("\n## ")[0]
    files = re.findall(r"^\d+\. `(pipeline/[\w/]+\.py)`", text, re.MULTILINE)
    assert 3 < len(files) <= 8
    for number, file in enumerate(files[2:], start=2):  # the verb's file is found by its name
        module = file.removesuffix(".py").replace("/", ".")
        importers = [each for each in files[:number] if f"from {module} import" in (REPOSITORY / each).read_text()]
        assert importers, f"{file} is imported by none of {files[:number]}"
