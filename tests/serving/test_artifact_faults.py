"""A damaged artifact is not loaded; an export that is killed or stopped leaves nothing that is."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from pipeline.runtime.errors import DamagedError
from pipeline.serving.artifact.export import ExportSummary
from pipeline.serving.artifact.manifest import CARD_FILES, ArtifactError, TableFiles, read_manifest
from pipeline.serving.scoring.predictor import Predictor
from tests.serving import kill_worker
from tests.serving.exports import run_export
from tests.support.examples import SEED
from tests.support.forks import WarmCommand

SIGKILLED = -9
FEW_ROWS = "parity.max_rows=300"
SOME_STAGES = ["after the manifest"]


@pytest.fixture
def artifact(small_artifact: ExportSummary, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_artifact.artifact, tmp_path / "artifact"))


def _files(artifact: Path) -> list[Path]:
    """All files that scores depend on; `card` verifies the two of the model card."""
    return sorted(path for path in artifact.rglob("*") if path.is_file() and path.name not in CARD_FILES)


def _assert_refused(artifact: Path, memory: str, what: str) -> None:
    try:
        Predictor.load(str(artifact), memory=memory)
    except DamagedError:
        return
    raise AssertionError(f"{what} is loaded from {memory}")


@pytest.mark.long
@pytest.mark.parametrize("memory", ["ram", "mapped"])
def test_every_truncated_lengthened_or_missing_file_is_refused(artifact: Path, memory: str) -> None:
    for path in _files(artifact):
        content = path.read_bytes()
        cuts = [b"", content[: len(content) // 2], content[:-1], content + b"\0"]
        for cut in cuts if memory == "ram" else cuts[1:2]:
            path.write_bytes(cut)
            _assert_refused(artifact, memory, f"{path.name} of {len(cut)} bytes in place of {len(content)}")
        path.unlink()
        _assert_refused(artifact, memory, f"an artifact without {path.name}")
        path.write_bytes(content)
    Predictor.load(str(artifact), memory=memory)


@pytest.mark.parametrize("flips", [pytest.param(1, id="some"), pytest.param(30, id="many", marks=pytest.mark.campaign)])
def test_every_flipped_bit_in_any_file_is_refused(artifact: Path, flips: int) -> None:
    draw = random.Random(flips + SEED)
    for path in _files(artifact):
        content = path.read_bytes()
        for _ in range(flips * (20 if path.name == "manifest.json" else 1)):
            changed, bit = bytearray(content), draw.randrange(8 * len(content))
            changed[bit // 8] ^= 1 << bit % 8
            path.write_bytes(changed)
            _assert_refused(artifact, "ram", f"bit {bit} of {path.name}")
        path.write_bytes(content)
    Predictor.load(str(artifact))


def test_a_manifest_that_asks_for_too_much_or_for_other_files_is_refused(artifact: Path) -> None:
    manifest = read_manifest(str(artifact))
    table: TableFiles = manifest.tables[0]
    (artifact.parent / "secret").write_bytes(b"x" * 8)
    hostile = {
        "more rows than it has bytes": replace(manifest, tables=[replace(table, rows=1 << 39, stored_rows=1 << 39)]),
        "a precision that there is none of": replace(manifest, tables=[replace(table, precision="int1")]),
        "a file outside": replace(manifest, files={**manifest.files, "../secret": {"size_bytes": 8}}),
        "a table that there is not": replace(manifest, features=[("cat_0", 99)]),
        "a kept list of another size": replace(manifest, tables=[replace(table, stored_rows=1, rows=2, kept=table.file)]),
        "no layers": replace(manifest, files={k: v for k, v in manifest.files.items() if k != "dense.pt2"}),
        "another format": replace(manifest, format_version=2),
    }  # fmt: skip
    for what, changed in hostile.items():
        (artifact / "manifest.json").write_text(changed.to_text())
        with pytest.raises(ArtifactError):
            read_manifest(str(artifact))
            raise AssertionError(what)


def test_naming_the_version_in_every_answer_costs_nothing(artifact: Path) -> None:
    predictor = Predictor.load(str(artifact))
    assert predictor.version is predictor.version == read_manifest(str(artifact)).version
    changed = replace(predictor.manifest, features=predictor.manifest.features[:-1])
    assert changed.version != predictor.version


@pytest.mark.parametrize(
    "stages",
    [
        pytest.param(SOME_STAGES, id="some", marks=pytest.mark.campaign),
        pytest.param(list(kill_worker.STAGES), id="all", marks=pytest.mark.campaign),
    ],
)
def test_an_export_killed_at_any_stage_leaves_nothing_that_loads_and_the_next_one_works(
    small_run: Path, tmp_path: Path, stages: list[str]
) -> None:
    for number, stage in enumerate(stages):
        folder = tmp_path / str(number)
        output = folder / "artifact"
        overrides = [f"run={small_run}", f"output={output}", FEW_ROWS]
        code = WarmCommand("tests.serving.kill_worker", [stage, *overrides], output=(1, 2)).wait(180)
        assert code == SIGKILLED, (stage, code)  # the stage was reached
        if stage in kill_worker.COMMITTED:
            Predictor.load(str(output))
        else:
            assert not output.exists(), stage
            for left in folder.iterdir() if folder.exists() else ():
                if left.is_dir():
                    with pytest.raises(ArtifactError, match="no artifact"):
                        Predictor.load(str(left))
        if stage in (SOME_STAGES[-1], *kill_worker.COMMITTED):
            summary = run_export(small_run, output, FEW_ROWS)
            assert summary.already_exported == (stage in kill_worker.COMMITTED)
            Predictor.load(summary.artifact)
            assert [path.name for path in folder.iterdir() if not path.name.endswith(".lock")] == ["artifact"]


@pytest.mark.campaign
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_an_export_that_is_stopped_puts_its_folder_away(
    small_run: Path, tmp_path: Path, sent: signal.Signals, code: int
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeline", "export", f"run={small_run}", f"output={tmp_path / 'artifact'}"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a background shell ignores it
    )  # fmt: skip
    assert process.stdout is not None
    # What torch does until then holds bare excepts, which now and then swallow a Ctrl-C.
    said = ""
    while "layers " not in said:
        said = process.stdout.readline()
        assert said, "it ended before its layers were exported"
    assert list(tmp_path.glob(".export-*/tables"))
    process.send_signal(sent)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == code, output
    assert "Traceback" not in output and list(tmp_path.iterdir()) == []
