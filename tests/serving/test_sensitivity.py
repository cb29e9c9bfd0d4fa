"""What a table's precision costs is found by the outputs' slopes, and is what running the layers anew finds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.evaluate import ExportJob
from pipeline.config.serving import PRECISIONS
from pipeline.serving.artifact import make_artifact, reference
from pipeline.serving.artifact.package import artifact_folder
from pipeline.serving.artifact.reference import Reference
from pipeline.serving.artifact.sensitivity import SPLIT, _Pooled
from pipeline.serving.artifact.source import open_source


@pytest.fixture
def of_small_run(small_run: Path, tmp_path: Path) -> Iterator[Reference]:
    job = load_config(ExportJob, [f"run={small_run}", f"output={tmp_path / 'artifact'}", "parity.splits=[validation]"])
    with artifact_folder(str(tmp_path / "artifact")) as at:
        yield make_artifact._make_reference(job, open_source(job), at)


def test_losses_by_slopes_are_those_of_running_the_layers_and_no_mix_is_measured_twice(
    of_small_run: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = _Pooled(of_small_run)
    slopes, start, wanted = batches._slopes, batches.ne(), [(24, "int8"), (25, "int4"), (25, "int2"), (0, "int2")]
    assert slopes is not None and start == pytest.approx(of_small_run.qualities[SPLIT][0].ne, abs=1e-9)
    by_slopes = [batches.ne(table, precision) - start for table, precision in wanted]
    monkeypatch.setattr(batches, "_slopes", None)  # as with compressed tables
    exact = [batches.ne(table, precision) - start for table, precision in wanted]
    assert by_slopes == pytest.approx(exact, rel=0.05, abs=1e-6) and max(abs(loss) for loss in exact) > 1e-5

    measured = []
    compared = reference.compare
    monkeypatch.setattr(reference, "compare", lambda *found: (measured.append(1), compared(*found))[1])
    mixes = [[precision] * len(of_small_run.trained.tables) for precision in (*PRECISIONS[:2], *PRECISIONS[:2])]
    parities = [of_small_run.parity_of(SPLIT, mix) for mix in mixes]
    assert parities[:2] == parities[2:] and len(measured) == 2
    assert parities[0].max_score_difference == 0 < parities[1].max_score_difference
