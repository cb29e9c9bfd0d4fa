"""Name the folders that jobs read and write, all of them below one root (OmegaConf only).

Every default below can be given on its own; `paths.root=/mnt/x` moves them all.
"""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import OmegaConf

from pipeline.runtime.errors import check_given


def under(root: str, name: str) -> str:
    """The path of `name` below `root`; a root of "." is left out, so that paths stay short in logs and saved jobs."""
    return name if root == "." else f"{root.rstrip('/')}/{name}"


OmegaConf.register_new_resolver("under", under, replace=True)


@dataclass
class PathsConfig:
    """`root` is a folder; the others lie below it unless they are given themselves."""

    root: str = "."
    data: str = "${under:${.root},datasets}"  # prepared data sets, a folder each
    raw: str = "${.data}/raw"  # generated text that prepare takes for its source
    runs: str = "${under:${.root},runs}"  # run folders of train
    retraining: str = "${under:${.root},retraining}"  # work folders of retrain
    registry: str = "${under:${.root},registry}"  # versions that retrain promotes
    plans: str = "${under:${.root},sharding_plans}"  # plan files
    artifacts: str | None = None  # what export writes, a folder a run; None: <run>/artifacts

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None:
                check_given(f"paths.{name}", value)
