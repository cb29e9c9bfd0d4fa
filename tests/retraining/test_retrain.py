"""A tick that has nothing to do, or finds another one at work, says so and does nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.cli.command_line import load_config
from pipeline.cli.registry import list_versions
from pipeline.config.jobs.retrain import RegistryJob, RetrainJob
from pipeline.data.raw.source import SourceChangedError
from pipeline.extras.generate.conversions import write_source
from pipeline.extras.generate.kinds import ConversionsConfig
from pipeline.retraining import row_sketch, window_runner
from pipeline.retraining.find_artifact import find_artifact
from pipeline.retraining.ledger import PROMOTED, REJECTED, SKIPPED, UNPINNED, Ledger, Record, describe_record
from pipeline.retraining.promotion import promote
from pipeline.retraining.registry import Registry
from pipeline.retraining.tick import describe, retrain
from pipeline.runtime.errors import DamagedError, UserError
from pipeline.runtime.storage.lease import take_lease
from pipeline.runtime.storage.signature import requiring
from pipeline.serving.artifact.manifest import read_manifest
from pipeline.serving.scoring.predictor import Predictor
from tests.data.test_changing_sources import CHANGES, STEPS, Moments
from tests.retraining.runs import candidate, finished
from tests.retraining.streams import FILE, job, window_name, write_window
from tests.runtime.test_signature import make_keys
from tests.support.messages import mentions, names


def _partition(folder: Path, name: str, whole: bool) -> None:
    (folder / "source" / name).mkdir(parents=True)
    (folder / "source" / name / "rows.tsv").write_text("1\t2\n")
    if whole:
        (folder / "source" / name / "_SUCCESS").touch()


@pytest.mark.parametrize("held", ["work", "registry"])
def test_of_two_ticks_at_once_one_works_and_the_other_says_so(tmp_path: Path, held: str) -> None:
    _partition(tmp_path, "dt=2026-11-01", whole=True)
    lease = take_lease(str(tmp_path / held), 60.0)
    summary = retrain(job(tmp_path))
    assert summary.records == [] and summary.note.startswith("nothing done: another retrain is running")
    lease.release()
    assert (
        retrain(job(tmp_path)).note
        == "window dt=2026-11-01 waits for the next window, on which both models are compared"
    )


@pytest.mark.long
def test_a_tick_without_work_is_quick_ends_with_0_and_loads_no_torch(tmp_path: Path) -> None:
    _partition(tmp_path, "dt=2026-11-01", whole=True)
    code = (
        "import sys; from tests.retraining.streams import job, write_window; from pipeline.retraining.tick import describe, retrain\n"
        f"from pathlib import Path; print(describe(retrain(job(Path({str(tmp_path)!r})))))\n"
        "assert not {'torch', 'duckdb'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "champion    none"


def test_a_window_that_came_too_late_is_skipped_once(tmp_path: Path) -> None:
    _partition(tmp_path, "dt=2025-11-01", whole=False)
    _partition(tmp_path, "dt=2025-11-02", whole=True)
    late = job(tmp_path, "windows.lateness_hours=24")
    (record,) = retrain(late).records
    assert (record.state, record.window) == (SKIPPED, "dt=2025-11-01")
    assert record.reasons == ["no _SUCCESS 24 h after its end"]
    again = retrain(late)
    assert again.records == [] and "dt=2025-11-02 waits for the next window" in describe(again)


def _rejected(folder: Path, *days: int) -> None:
    for day in days:
        record = Record(
            REJECTED, f"dt=2026-11-{day:02d}", data={"accepted": False}, begin=f"2026-11-{day:02d}T00:00:00+00:00"
        )
        Ledger(str(folder / "registry")).append(record)


@pytest.mark.long
def test_a_tick_says_what_to_do_where_no_window_passes_any_more(tmp_path: Path) -> None:
    for day in (1, 2, 3):
        _partition(tmp_path, f"dt=2026-11-0{day}", whole=True)
    _rejected(tmp_path, 2, 3)
    assert "checks.first" not in retrain(job(tmp_path)).note
    _rejected(tmp_path, 1, 2)
    assert mentions(retrain(job(tmp_path)).note, "4 dt=2026-11-01 checks.first=2026-11-01T00:00")


def test_a_window_to_retry_is_one_that_has_come_and_is_named_until_it_is_judged(tmp_path: Path) -> None:
    _partition(tmp_path, "dt=2026-11-01", whole=True)
    _rejected(tmp_path, 1)
    assert mentions(retrain(job(tmp_path, "retry=[dt=2026-11-01]")).note, "retry=[dt=2026-11-01] again")
    with pytest.raises(UserError, match=names("'2026-11-01' 'dt=2026-11-01'")):
        retrain(job(tmp_path, "retry=[2026-11-01]"))


def test_a_window_of_long_ago_that_was_judged_again_brings_no_others_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tick reads the newest records alone; where one was of an old window, all after that seemed to be new."""
    for day in range(1, 10):
        _partition(tmp_path, f"dt=2026-11-0{day}", whole=True)
    _rejected(tmp_path, *range(1, 9), 1)
    Ledger(str(tmp_path / "registry")).append(Record(UNPINNED))  # of no window
    monkeypatch.setattr("pipeline.retraining.tick.MAX_READ", 5)
    assert retrain(job(tmp_path)).note.startswith("window dt=2026-11-09 waits for the next window")


def test_windows_wait_while_a_version_is_pinned(tmp_path: Path) -> None:
    registry = Registry(str(tmp_path / "registry"))
    chosen = candidate(finished(tmp_path / "run"), "dt=2026-10-31", "", None)
    promote(registry, Ledger(registry.path), chosen, 5, lambda: None)
    registry.pin("v000001", "calibration fell")
    (tmp_path / "registry" / "versions").rename(tmp_path / "elsewhere")
    with pytest.raises(DamagedError, match=names("v000001 rollback unpin")):
        retrain(job(tmp_path))
    (tmp_path / "elsewhere").rename(tmp_path / "registry" / "versions")
    for name in ("dt=2026-11-01", "dt=2026-11-02"):
        _partition(tmp_path, name, whole=True)
    summary = retrain(job(tmp_path))
    assert summary.records == [] and summary.note.startswith("v000001 is pinned (calibration fell)")


@pytest.mark.parametrize("name", ["config.yaml", "data/dataset.json"])
def test_a_tick_checks_the_files_of_the_champion_before_it_uses_them(tmp_path: Path, name: str) -> None:
    """`registry verify` found the damage, and a tick promoted a challenger of the damaged champion."""
    registry = Registry(str(tmp_path / "registry"))
    chosen = candidate(finished(tmp_path / "run"), "dt=2026-10-31", "", None)
    promote(registry, Ledger(registry.path), chosen, 5, lambda: None)
    for day in ("dt=2026-11-01", "dt=2026-11-02"):
        _partition(tmp_path, day, whole=True)
    path = tmp_path / "registry" / "versions" / "v000001" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedError, match=names(f"v000001 {name} checksum rollback unpin")):
        retrain(job(tmp_path))
    assert [record.window for record in Ledger(registry.path).newest()] == ["dt=2026-10-31"]


@pytest.mark.campaign
def test_a_window_that_changes_at_twelve_moments_of_a_tick_is_refused_or_judged_in_one_state(tmp_path: Path) -> None:
    for number in (1, 2):
        write_window(tmp_path / "source", number, 3000)
    loose = [
        "gate.calibration_min=0.2", "gate.calibration_max=5", "gate.ne_tolerance=1", "gate.max_ne=5", "gate.min_rows=100",
        "gate.export.enabled=false", "checks.min_history=14", "max_catchup=1",
    ]  # fmt: skip
    steps = [*STEPS, (row_sketch, "sketch_rows"), (window_runner, "prepare"), (window_runner, "check_unchanged"), (window_runner, "train_challenger")]  # fmt: skip
    changes = ["truncated", "rows appended", "labels flipped", "replaced"]
    outcomes: list[str] = []
    num_steps = 0
    for number in range(-1, 12):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "source", folder / "source")
        path = folder / "source" / window_name(1 + number % 2) / FILE
        change = _append_rows if changes[number % 4] == "rows appended" else CHANGES[changes[number % 4]]
        at = round((number + 0.5) / 12 * num_steps) if number >= 0 else -1
        before = path.read_bytes()
        with pytest.MonkeyPatch.context() as patch:
            moments = Moments(patch, at, lambda change=change, path=path: change(path), steps)
            try:
                (record,) = retrain(job(folder, *loose)).records
            except SourceChangedError as error:
                assert path.name in str(error) and not list(Ledger(str(folder / "registry")).newest())
                outcomes.append("refused")
                continue
        num_steps = num_steps or moments.count
        assert record.state == PROMOTED, record.reasons
        if number % 2 == 0:  # the window that was trained on; without a champion its last rows are held out
            found = record.data["statistics"]
            labels = [[line[:1] == b"1" for line in each.splitlines()] for each in (before, path.read_bytes())]
            kept = [each[: round(len(each) * 0.98)] for each in labels]
            states = [(len(each), pytest.approx(sum(each) / len(each))) for each in kept]
            assert (found["rows"], found["label_rate"]) in states
        outcomes.append("read in one state")
    print(f"12 moments among {num_steps} of a tick: {outcomes[1:]}")
    assert "refused" in outcomes


def _append_rows(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    with open(path, "ab") as file:
        file.write(b"".join(lines[:200]))


def test_tables_of_managed_collision_are_retrained_and_exported_as_others_are(tmp_path: Path) -> None:
    managed = "tables.cat_3={compression:{kind:managed_collision,num_rows:100}}"
    assert job(tmp_path, managed).gate.export.enabled


@pytest.mark.campaign
def test_versions_of_managed_collision_follow_each_other_with_artifacts(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        write_window(tmp_path / "source", number, 4000)
    loose = [
        "gate.calibration_min=0.2",
        "gate.calibration_max=5",
        "gate.ne_tolerance=1",
        "gate.max_ne=5",
        "gate.min_rows=100",
        "checks.min_history=14",
        "checks.champion_ne_rise=null",
        "checks.unknown_share_rise=null",
        "max_catchup=5",
    ]
    summary = retrain(
        job(
            tmp_path,
            "data.feature_ids.cat_25={kind: hash, hash_size: 100000}",
            "tables.cat_25.compression={kind: managed_collision, num_rows: 512, buckets: 2, eviction_interval: 5}",
            *loose,
        )
    )
    assert [record.state for record in summary.records] == [PROMOTED, PROMOTED]
    champion = Registry(str(tmp_path / "registry")).champion()
    assert champion is not None and champion.artifact is not None


@pytest.mark.campaign
def test_versions_of_several_labels_follow_each_other_with_artifacts(tmp_path: Path) -> None:
    config = ConversionsConfig(num_rows=18_000, num_users=50, num_items=30, click_rate=0.4, conversion_rate=0.4)
    write_source(config, str(tmp_path / "rows.tsv"), 1)
    header, *rows = (tmp_path / "rows.tsv").read_text().splitlines()
    for number in (1, 2, 3):
        _partition(tmp_path, f"dt=2026-11-0{number}", whole=True)
        part = rows[(number - 1) * 6000 : number * 6000]
        (tmp_path / "source" / f"dt=2026-11-0{number}" / "rows.tsv").write_text("\n".join([header, *part, ""]))
    words = [
        "experiment=conversions_mmoe", "hardware=cpu", f"source={tmp_path}/source", f"run_dir={tmp_path}/work",
        f"registry.path={tmp_path}/registry", "trainer.global_batch_size=128", "tables.default.embedding_dim=4",
        "model.expert_layer_sizes=[16]", "optimizer.dense.lr=0.005", "data.rows_per_row_group=128", "threads=1",
        "windows.lateness_hours=0", "gate.task=conversion", "gate.held={click: 0.5}", "gate.calibration_min=0.2",
        "gate.calibration_max=5", "gate.ne_tolerance=1", "gate.max_ne=5", "gate.min_rows=100", "checks.min_history=14",
        "checks.champion_ne_rise=null", "checks.unknown_share_rise=null", "max_catchup=5", "trainer.epochs=3",
        "checks.repeated_share=null",
    ]  # fmt: skip
    summary = retrain(load_config(RetrainJob, words))
    assert [record.state for record in summary.records] == [PROMOTED, PROMOTED], [r.reasons for r in summary.records]
    metrics = summary.records[1].metrics
    assert metrics["eval_label_rate"] > 0.3 and metrics["eval_rows"] < 4000  # conversions, of clicked rows
    assert "NE of conversion 0." in describe_record(summary.records[1])
    assert "(conversion)" in list_versions(load_config(RegistryJob, [f"registry={tmp_path}/registry"]))[-1]
    champion = Registry(str(tmp_path / "registry")).champion()
    assert champion is not None and champion.artifact is not None
    assert [task.name for task in read_manifest(champion.artifact).tasks] == ["click", "conversion"]
    with pytest.raises(UserError, match=names("gate.task='clik' click")):
        load_config(RetrainJob, [*words, "gate.task=clik"])


@pytest.mark.campaign
def test_signed_windows_are_promoted_served_and_refused_after_an_older_pointer(tmp_path: Path) -> None:
    private, public = make_keys(tmp_path, "own")
    keys = [f"checkpoint.sign_key={private}", f"checkpoint.require_signature=[{public}]"]
    for number in (1, 2, 3):
        write_window(tmp_path / "source", number, 4000)
    words = [
        *keys,
        "gate.calibration_min=0.2",
        "gate.calibration_max=5",
        "gate.ne_tolerance=1",
        "gate.max_ne=5",
        "gate.min_rows=100",
        "checks.min_history=14",
        "checks.champion_ne_rise=null",
        "checks.unknown_share_rise=null",
    ]
    first = retrain(job(tmp_path, *words, "max_catchup=1"))
    assert [record.state for record in first.records] == [PROMOTED], first.records
    pointer = tmp_path / "registry/champion.json"
    older = pointer.read_text()
    second = retrain(job(tmp_path, *words, "max_catchup=1"))
    assert [record.state for record in second.records] == [PROMOTED], second.records
    with requiring([public], str(tmp_path / "accepted.json")):
        found = find_artifact(str(tmp_path / "registry"))
        assert Predictor.load(found.path).version and found.key.endswith("v000002")
    pointer.write_text(older)
    with pytest.raises(UserError, match=names("champion.json number accepted")):
        retrain(job(tmp_path, *words, "max_catchup=1"))
    with requiring([public], str(tmp_path / "accepted.json")), pytest.raises(UserError, match=names("champion.json")):
        find_artifact(str(tmp_path / "registry"))
