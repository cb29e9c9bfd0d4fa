"""Define a warm start: the source of first weights, and the policies for tables that differ (stdlib
only)."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.runtime.errors import ConfigError, check_at_least, check_choice


@dataclass
class WarmStartConfig:
    """Start at step 0 with the weights of another run, under any plan. A run folder that has a step
    is resumed instead.

    `run` is a run folder, whose newest valid step is used unless `step` names one. `checkpoint` is the folder
    of one step instead. A table is looked up by its own name, or by its old name in `renames` {old: new}.
    """

    run: str | None = None
    checkpoint: str | None = None
    step: int | None = None
    renames: dict[str, str] = field(default_factory=dict)
    # Policies for tables that only the job has, that only the checkpoint has, or that have more
    # rows, fewer rows, another dtype or another embedding_dim. `fresh`: initialized as from
    # scratch.
    new_tables: str = "fresh"
    dropped_tables: str = "drop"
    grown_tables: str = "extend"
    shrunk_tables: str = "cut"
    retyped_tables: str = "cast"
    reshaped_tables: str = "refuse"
    # Policy for a compressed table whose settings or vocabulary differ: ids share its rows, so no
    # row can move with its value to another id.
    composed_tables: str = "refuse"
    # remap: a row moves to the new id of its value; keep: ids have the same meaning as before.
    ids: str = "remap"
    data_path: str | None = None  # of the data set of the checkpoint; None: its path at that time
    # `matching`: load layers with the same name and shape, initialize all other layers
    dense: str = "load"
    optimizer: str = "keep"

    def __post_init__(self) -> None:
        if (self.run is None) == (self.checkpoint is None):
            raise ConfigError("warm_start needs one of run=<a run folder> and checkpoint=<the folder of a step>")
        if self.checkpoint is not None and self.step is not None:
            raise ConfigError("warm_start.step belongs to warm_start.run; warm_start.checkpoint already names a step")
        check_at_least("warm_start.step", self.step, 0, allow_none=True)
        for name, choices in POLICIES.items():
            check_choice(f"warm_start.{name}", getattr(self, name), choices)
        if len(set(self.renames.values())) < len(self.renames):
            raise ConfigError(
                f"warm_start.renames={self.renames} maps two tables to one name; give each a different name"
            )


POLICIES = {
    "new_tables": ("fresh", "refuse"),
    "dropped_tables": ("drop", "refuse"),
    "grown_tables": ("extend", "fresh", "refuse"),
    "shrunk_tables": ("cut", "fresh", "refuse"),
    "retyped_tables": ("cast", "fresh", "refuse"),
    "reshaped_tables": ("refuse", "fresh"),
    "composed_tables": ("refuse", "fresh"),
    "ids": ("remap", "keep"),
    "dense": ("load", "fresh", "matching"),
    "optimizer": ("keep", "reset"),
}
