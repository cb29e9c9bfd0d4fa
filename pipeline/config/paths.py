"""Name the folders that jobs read and write, all below one root (OmegaConf only).

Each folder can be set separately. `paths.root=/mnt/x` moves all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import OmegaConf

from pipeline.runtime.errors import check_given


def under(root: str, name: str) -> str:
    """Return the path of `name` below `root`.

    A root of "." is left out, which keeps paths short.
    """
    return name if root == "." else f"{root.rstrip('/')}/{name}"


OmegaConf.register_new_resolver("under", under, replace=True)


@dataclass
class PathsConfig:
    """`root` is a folder. The other folders are below it unless they are set."""

    root: str = "."
    data: str = "${under:${.root},datasets}"  # prepared data sets, one folder each
    raw: str = "${.data}/raw"  # generated text, the source of prepare
    runs: str = "${under:${.root},runs}"  # run folders of train
    retraining: str = "${under:${.root},retraining}"  # work folders of retrain
    registry: str = "${under:${.root},registry}"  # versions that retrain promotes
    plans: str = "${under:${.root},sharding_plans}"  # plan files
    artifacts: str | None = None  # artifacts of export, one folder per run; None: <run>/artifacts

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None:
                check_given(f"paths.{name}", value)
