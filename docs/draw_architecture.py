"""Draw docs/architecture.svg and write the packages into ARCHITECTURE.md:  python docs/draw_architecture.py

ROOMS and FLOW are the data of the picture. A layer lists its packages, and a package imports only lower layers. tests/docs/test_architecture.py compares ROOMS with the layers contract of setup.cfg, and both files with what this
script writes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from html import escape
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
OUTPUT = REPOSITORY / "docs" / "architecture.svg"
PAGE = REPOSITORY / "ARCHITECTURE.md"
BEGIN, END = "<!-- packages: written by docs/draw_architecture.py -->", "<!-- end of packages -->"

# Top floor first: (room, what it holds).
ROOMS = [
    [("launch", "TorchX components, Slurm, Kubernetes")],
    [("cli", "one file per verb: parse, call, describe")],
    [("retraining", "windows, challenger, gate, registry")],
    [("serving", "artifact, scoring, HTTP")],
    [("training", "run, trainer, hooks, metrics")],
    [("models", "one file per model; tasks, layers")],
    [("sharding", "TorchRec, collectives, tiers")],
    [("planner", "hardware + tables → ShardingPlan")],
    [("checkpoint", "verified steps"), ("embeddings", "tables")],
    [("data", "raw rows, Parquet shards, batches")],
    [("devices", "what differs between CPU and GPU")],
    [("config", "schemas, component registry")],
    [("runtime", "processes, storage, errors, logs")],
]
# What a reader needs to know in addition to the picture.
HOLDS = {
    "launch": "TorchX components, Slurm, Kubernetes; `extras/` has other schedulers",
    "cli": "one thin file for each verb; `api/` has the same verbs as Python functions; only this package uses Hydra",
    "retraining": "`retrain`: it trains a model on new data, compares it with the current one, promotes it; the registry of versions",
    "serving": "`artifact/` (quantize, prune, certify), `scoring/` (predictor, tables, raw rows), `http/`",
    "training": "train and evaluate as functions, the trainer and its hooks; `runs/` compares and reports",
    "models": "one file for each model; `tasks/` (a task is a loss with its metrics); `layers/`",
    "sharding": "`torchrec/` (sharder, checks, managed collision), `collectives/`, `tiers/`",
    "planner": "cost model, `search/` (arrays in, assignment out), plan files, the page",
    "checkpoint": "immutable verified steps; reshard, warm start, export of a table",
    "embeddings": "tables resolved from config and data; `compression/`",
    "data": "`raw/` formats, `prepare/`, `read/`, `generate/`, dataset.json",
    "devices": "what differs between devices (`base.py`), CUDA, `cpu/` (Numba kernels, threads, exchange within a host, memory)",
    "config": "every schema as dataclasses, saved jobs, the registry of components; no torch",
    "runtime": "`process/` (ranks, agent, watchdog, signals), `storage/` (paths, object stores, leases), errors, logs",
}
# The path of a click log: (what it is, the verb that makes the next one, the room that does the work).
FLOW = [
    ("raw rows", "prepare", "data"),
    ("Parquet shards + dataset.json", "plan", "planner"),
    ("plan.json", "train", "training"),
    ("verified checkpoint", "export", "serving"),
    ("quantized artifact + certificate", "serve, predict", "serving"),
    ("scores", "", ""),
]
NOTES = [
    "The packages in blue do this work. retrain",
    "runs this flow for each window of new data,",
    "and promotes a model that passes all checks.",
]

WIDTH, MARGIN, TOP = 880, 24, 64
FLOOR_HEIGHT, GAP = 38, 6
ROOMS_WIDTH, FLOW_LEFT, FLOW_WIDTH = 470, 560, 296
STEP_HEIGHT, STEP_GAP = 40, 36
# The same colours on a white and on a dark page: GitHub shows the file on either.
STYLE = """
    text { font-family: system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif; fill: #1f2328; }
    .title { font-size: 15px; font-weight: 600; }
    .room { font-size: 14px; font-weight: 600; }
    .note { font-size: 12.5px; fill: #59636e; }
    .box { fill: #f6f8fa; stroke: #8c959f; }
    .work { fill: #ddf4ff; stroke: #0969da; }
    .line { stroke: #59636e; stroke-width: 1.5; fill: none; }
    .head { fill: #59636e; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3; }
      .note { fill: #9198a1; }
      .box { fill: #161b22; stroke: #656c76; }
      .work { fill: #0c2d4d; stroke: #4493f8; }
      .line { stroke: #9198a1; }
      .head { fill: #9198a1; }
    }
"""


def text(x: float, y: float, words: str, kind: str, anchor: str = "start") -> str:
    return f'  <text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'  <rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>'


def arrow(x: float, top: float, bottom: float) -> list[str]:
    return [
        f'  <path class="line" d="M {x:g} {top:g} V {bottom - 7:g}"/>',
        f'  <path class="head" d="M {x - 5:g} {bottom - 8:g} h 10 l -5 8 z"/>',
    ]


def draw_rooms() -> list[str]:
    """Draw a row for each layer. Packages of one layer do not import each other."""
    lines = [text(MARGIN, 40, "Packages: each imports only lower layers", "title")]
    working = {room for _, _, room in FLOW}
    for level, floor in enumerate(ROOMS):
        y = TOP + level * (FLOOR_HEIGHT + GAP)
        width = (ROOMS_WIDTH - GAP * (len(floor) - 1)) / len(floor)
        for position, (name, holds) in enumerate(floor):
            x = MARGIN + position * (width + GAP)
            lines.append(box(x, y, width, FLOOR_HEIGHT, "work" if name in working else "box"))
            lines.append(text(x + 14, y + 24, name, "room"))
            lines.append(text(x + width - 14, y + 24, holds, "note", "end"))
    return lines


def draw_flow() -> list[str]:
    """Draw the path of a click log, with the verb and the package next to each arrow."""
    lines = [text(FLOW_LEFT, 40, "Flow: from a click log to a score", "title")]
    middle = FLOW_LEFT + 40
    for number, (thing, verb, room) in enumerate(FLOW):
        y = TOP + number * (STEP_HEIGHT + STEP_GAP)
        lines.append(box(FLOW_LEFT, y, FLOW_WIDTH, STEP_HEIGHT, "box"))
        lines.append(text(FLOW_LEFT + 14, y + 25, thing, "room"))
        if verb:
            lines += arrow(middle, y + STEP_HEIGHT, y + STEP_HEIGHT + STEP_GAP)
            lines.append(text(middle + 16, y + STEP_HEIGHT + 23, f"{verb}  ({room})", "note"))
    below = TOP + len(FLOW) * (STEP_HEIGHT + STEP_GAP)
    lines += [text(FLOW_LEFT, below + 18 * number, note, "note") for number, note in enumerate(NOTES)]
    return lines


def draw() -> str:
    height = TOP + len(ROOMS) * (FLOOR_HEIGHT + GAP) + MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">',
            "  <title>Packages of the pipeline, and the path of a click log through them</title>",
            f"  <style>{STYLE}  </style>",
            *draw_rooms(),
            *draw_flow(),
            "</svg>",
            "",
        ]
    )


def imports_of(room: str) -> list[str]:
    """Return the packages that a package imports, lowest layer last. Imports for type checkers do not count."""
    folder = REPOSITORY / room if room == "launch" else REPOSITORY / "pipeline" / room
    found = {name.split(".")[1] for file in folder.rglob("*.py") for name in _imported(ast.parse(file.read_text()))}
    return [name for floor in ROOMS for name, _ in floor if name in found - {room}]


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    if isinstance(node, ast.ImportFrom) and node.module:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    yield from (name for name in names if name.startswith("pipeline."))
    for child in ast.iter_child_nodes(node):
        yield from _imported(child)


def room_table() -> str:
    rooms = [name for floor in ROOMS for name, _ in floor]
    rows = [f"| `{room}` | {HOLDS[room]} | {', '.join(imports_of(room)) or 'nothing'} |" for room in rooms]
    return "\n".join(["| package | holds | imports |", "|---|---|---|", *rows])


def page() -> str:
    """Return ARCHITECTURE.md with the table of packages."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n{room_table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    OUTPUT.write_text(draw())
    PAGE.write_text(page())
    print(f"written: {OUTPUT} and the packages in {PAGE}")
