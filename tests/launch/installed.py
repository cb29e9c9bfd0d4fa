"""Turn setup.cfg into what an installation tells others: TorchX finds our components, schedulers and commands by it."""

from __future__ import annotations

import configparser
import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def installed_under(folder: Path) -> dict[str, str]:
    """The environment in which this checkout counts as installed, whatever pip knows."""
    parsed = configparser.ConfigParser()
    parsed.read(REPOSITORY / "setup.cfg")
    groups = parsed["options.entry_points"]
    info = folder / "torchrec_pipeline-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchrec-pipeline\nVersion: 0\n")
    (info / "entry_points.txt").write_text("".join(f"[{group}]{groups[group]}\n" for group in groups))
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(REPOSITORY)])}
