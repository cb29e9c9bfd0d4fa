"""Schema of a warm start: where first weights come from, and what becomes of tables that differ (stdlib only)."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.runtime.errors import ConfigError, check_at_least, check_choice


@dataclass
class WarmStartConfig:
    """Begin at step 0 with the weights of another run, under any plan. A run folder with a step of its own is resumed.

    `run` is a run folder, whose newest step that verifies is taken unless `step` says another; or `checkpoint` is one
    step's folder. A table is looked for under its own name, or under the one that `renames` {old: new} says it had.
    """

    run: str | None = None
    checkpoint: str | None = None
    step: int | None = None
    renames: dict[str, str] = field(default_factory=dict)
    # What becomes of a table that the checkpoint lacks, that the job lacks, that has more or fewer rows, another
    # dtype, another embedding_dim. `fresh`: initialized as from scratch.
    new_tables: str = "fresh"
    dropped_tables: str = "drop"
    grown_tables: str = "extend"
    shrunk_tables: str = "cut"
    retyped_tables: str = "cast"
    reshaped_tables: str = "refuse"
    # What becomes of a compressed table whose settings or vocabulary are others: its rows are shared by ids, so none can
    # follow its value to another id.
    composed_tables: str = "refuse"
    # A row goes to where its value is in the new vocabulary; `keep` takes ids to mean what they meant.
    ids: str = "remap"
    data_path: str | None = None  # of the data set that the checkpoint was trained on; None: where it was then
    dense: str = "load"  # `matching`: the layers of the same name and shape; the others are fresh
    optimizer: str = "keep"

    def __post_init__(self) -> None:
        if (self.run is None) == (self.checkpoint is None):
            raise ConfigError("warm_start wants one of run=<a run folder> and checkpoint=<the folder of a step>")
        if self.checkpoint is not None and self.step is not None:
            raise ConfigError("warm_start.step belongs to warm_start.run; warm_start.checkpoint is a step already")
        check_at_least("warm_start.step", self.step, 0, allow_none=True)
        for name, choices in POLICIES.items():
            check_choice(f"warm_start.{name}", getattr(self, name), choices)
        if len(set(self.renames.values())) < len(self.renames):
            raise ConfigError(f"warm_start.renames={self.renames} makes one table of two; give each another name")


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
