"""Run folders that were copied to an object store are listed, compared, shown, tagged, reported on and removed as local ones are."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipeline.cli.command_line import load_config, read_arguments
from pipeline.extras.runs.cli import report as report_verb
from pipeline.extras.runs.cli import runs as verb
from pipeline.extras.runs.config import ReportJob, RunsJob
from pipeline.extras.runs.folder import find_runs
from pipeline.runtime.errors import ConfigError
from pipeline.runtime.storage import storage
from tests.support.messages import mentions
from tests.support.object_store import BUCKET, store

__all__ = ["store"]
ROOT = f"s3://{BUCKET}/team/runs"


def _say(*words: str) -> str:
    return verb.run(load_config(RunsJob, read_arguments(words, verb.COMMANDS, "list").overrides()))


def _upload(run: Path, to: str, lr: str = "") -> str:
    for file in sorted(path for path in run.rglob("*") if path.is_file()):
        name = str(file.relative_to(run))
        if not name.startswith((".lease", "tensorboard", "logs")):
            content = file.read_bytes()
            if name == "config.yaml" and lr:
                content = re.sub(rb"(sparse: \{name: \w+, )lr: [\d.e-]+", rb"\1" + lr.encode(), content)
            storage.publish_bytes(f"{to}/{name}", content)
    return to


@pytest.mark.campaign
@pytest.mark.usefixtures("store")
def test_runs_in_an_object_store_are_read_as_local_ones(run_as_trained: Path, tmp_path: Path) -> None:
    first, second = _upload(run_as_trained, f"{ROOT}/a/first"), _upload(run_as_trained, f"{ROOT}/b/second", "lr: 0.5")
    local = Path(shutil.copytree(run_as_trained, tmp_path / "first"))
    assert [run.path for run in find_runs(ROOT)] == [first, second]
    listed = _say("list", ROOT, "sort=ne", f"output=s3://{BUCKET}/list.parquet")
    assert all(run in listed for run in (first, second)) and "finished" in listed
    with storage.open_file(f"s3://{BUCKET}/list.parquet", "rb") as file:
        assert len(pq.read_table(file)) == 2
    shown = _say("show", first)
    assert shown.replace(first, "") == _say("show", str(local)).replace(str(local), "")
    compared = _say("compare", first, second, f"html=s3://{BUCKET}/compared.html")
    assert mentions(compared, f"{first} {second} ne the same up to rounding")
    assert first in storage.read_text(f"s3://{BUCKET}/compared.html")
    assert "tags: keep" in _say("tag", first, "keep", "note='from afar'")
    page = report_verb.report(load_config(ReportJob, [f"run={first}"]))
    assert page == f"{first}/report.html" and "from afar" in storage.read_text(page)
    with pytest.raises(ConfigError, match="force=true"):
        _say("remove", first)
    _say("remove", second)
    assert [run.path for run in find_runs(ROOT)] == [first]
