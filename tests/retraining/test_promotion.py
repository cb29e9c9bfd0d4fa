"""A promotion that is killed between any two of its operations leaves the old champion or the new one, and is completed."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.cli.registry import run as registry_verb
from pipeline.config.jobs.retrain import RegistryJob
from pipeline.retraining import promotion
from pipeline.retraining.ledger import PROMOTED, Ledger
from pipeline.retraining.promotion import FinishedRun, add_run, complete, files_of_artifact, finished_run, promote
from pipeline.retraining.registry import PinnedError, Registry, RegistryError
from pipeline.runtime.errors import ConfigError, DamagedError, DataError
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.checksums import checksums_of
from pipeline.runtime.storage.lease import take_lease
from pipeline.runtime.storage.manifest import seal_manifest
from pipeline.runtime.storage.signature import Purpose, requiring, signing
from tests.retraining.runs import candidate, finished
from tests.runtime.test_signature import make_keys
from tests.support.kills import before_each_change_of_files, killed_at
from tests.support.messages import names

KEEP = 2


def _promote(path: str, run: FinishedRun) -> None:
    """The promotion of window w3 by a tick: first what an earlier one has left, then its own."""
    registry, ledger = Registry(path), Ledger(path)
    complete(registry, ledger)
    pointer = registry.pointer()
    assert pointer is not None
    if registry.version(pointer.version).lineage["window"] != "w3":
        promote(registry, ledger, candidate(run, "w3", pointer.version, pointer), KEEP, lambda: None)
    registry.prune(KEEP)


def _two_versions(path: str, folder: Path) -> None:
    registry, ledger, pointer = Registry(path), Ledger(path), None
    for number, window in enumerate(("w1", "w2")):
        parent = pointer.version if pointer else ""
        run = finished(folder / window, b"%d" % number * 5000)
        promote(registry, ledger, candidate(run, window, parent, pointer), KEEP, lambda: None)
        pointer = registry.pointer()


def _check_and_complete(path: str, run: FinishedRun) -> str:
    """The champion that the killed process left; the registry is as after an undisturbed promotion then."""
    registry, ledger = Registry(path), Ledger(path)
    champion = registry.champion()
    assert champion is not None and registry.verify(champion)[0] == ""
    _promote(path, run)
    after = registry.champion()
    assert after is not None and (after.lineage["window"], after.lineage["parent"]) == ("w3", "v000002")
    assert registry.verify(after)[0] == ""
    assert [record.window for record in ledger.newest() if record.state == PROMOTED] == ["w3", "w2", "w1"]
    assert registry.names() == ["v000002", after.name]
    assert set(storage.list_folder(storage.join(path, "versions"))) == {"v000002", after.name}
    return str(champion.lineage["window"])


@pytest.mark.long
@pytest.mark.parametrize("stride", [pytest.param(4, id="some"), pytest.param(1, id="all", marks=pytest.mark.campaign)])
def test_a_kill_between_any_two_changes_of_files_leaves_the_old_or_the_new_champion(
    tmp_path: Path, stride: int
) -> None:
    clean = tmp_path / "clean"
    _two_versions(str(clean), tmp_path)
    run = finished(tmp_path / "w3")
    left: dict[str, int] = {"w2": 0, "w3": 0}
    number = 1
    while True:
        path = tmp_path / str(number)
        shutil.copytree(clean, path)
        if not killed_at(number, before_each_change_of_files, lambda path=path: _promote(str(path), run)):
            break
        left[_check_and_complete(str(path), run)] += 1
        shutil.rmtree(path)
        number += stride
    assert left["w2"] > 20 / stride and left["w3"] > 5 / stride, left


def test_a_promotion_does_not_overrun_a_rollback(tmp_path: Path) -> None:
    path = str(tmp_path / "registry")
    _two_versions(path, tmp_path)
    registry, ledger = Registry(path), Ledger(path)
    pointer = registry.pointer()
    run = finished(tmp_path / "w3")

    def person() -> None:
        if registry.pointer() == pointer:
            registry.pin("v000001", "by hand")

    with pytest.raises(PinnedError, match=names("v000001")):
        promote(registry, ledger, candidate(run, "w3", "v000002", pointer), KEEP, person)
    champion = registry.champion()
    assert champion is not None and champion.name == "v000001"


def test_what_changed_after_training_is_not_promoted(tmp_path: Path) -> None:
    path = str(tmp_path / "registry")
    run = finished(tmp_path / "run")
    (Path(run.checkpoint) / "__0_0.distcp").write_bytes(b"weightz" * 1000)
    with pytest.raises(DamagedError, match=names("__0_0.distcp v000001")):
        promote(Registry(path), Ledger(path), candidate(run, "w1", "", None), KEEP, lambda: None)
    assert Registry(path).pointer() is None


def test_an_artifact_that_changed_after_its_export_is_not_promoted(tmp_path: Path) -> None:
    path, artifact = str(tmp_path / "registry"), tmp_path / "artifact"
    (artifact / "tables").mkdir(parents=True)
    rows = artifact / "tables" / "00000.rows"
    rows.write_bytes(b"rows")
    (artifact / "manifest.json").write_text(
        seal_manifest({"files": {"tables/00000.rows": checksums_of(str(rows))}, "format_version": 1}, Purpose.ARTIFACT)
    )
    found = files_of_artifact(str(artifact))
    assert sorted(found) == ["artifact/manifest.json", "artifact/tables/00000.rows"]
    chosen = replace(candidate(finished(tmp_path / "run"), "w1", "", None), extra=found)
    rows.write_bytes(b"rowz")
    with pytest.raises(DamagedError, match=names("tables/00000.rows v000001")):
        promote(Registry(path), Ledger(path), chosen, 5, lambda: None)
    assert Registry(path).pointer() is None


@pytest.mark.parametrize("leased", [True, False], ids=["of a tick with a lease", "in a store without leases"])
def test_adding_a_run_does_not_remove_what_a_tick_is_publishing(
    tmp_path: Path, leased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "registry")
    run = finished(tmp_path / "run")
    monkeypatch.setattr(promotion, "finished_run", lambda _: run)
    attempt = tmp_path / "registry" / "versions" / ".attempt-v000001-1234abcd"
    attempt.mkdir(parents=True)
    lease = take_lease(path, 60.0)
    if leased:
        with pytest.raises(RegistryError, match="a retrain is running"):
            add_run(Registry(path), Ledger(path), run.folder)
        assert Registry(path).pointer() is None
    lease.release()
    assert add_run(Registry(path), Ledger(path), run.folder).version == "v000001"
    assert attempt.is_dir(), "the attempt of a tick that publishes at this moment"


def test_a_run_and_a_version_are_taken_by_the_key_that_signed_them_alone(tmp_path: Path) -> None:
    (own, public), (other, others) = make_keys(tmp_path, "own"), make_keys(tmp_path, "other")
    path = str(tmp_path / "registry")
    with signing(own):
        run = finished(tmp_path / "run")
    words = {"registry": path, "run": run.folder}
    with pytest.raises(DamagedError, match=names("step_00000007 signed another key")):
        registry_verb(RegistryJob(command="add", sign_key=other, require_signature=others, **words))
    with pytest.raises(ConfigError, match=names("require_signature sign_key")):
        RegistryJob(command="add", require_signature=public, **words)
    registry_verb(RegistryJob(command="add", sign_key=own, require_signature=public, **words))
    with signing(own), requiring(public):  # the next one, as a tick of retrain promotes it
        pointer = Registry(path).pointer()
        assert pointer is not None
        later = candidate(finished(tmp_path / "later", b"other" * 1000), "w2", pointer.version, pointer)
        promote(Registry(path), Ledger(path), later, KEEP, lambda: None)
        champion = Registry(path).champion()
    assert champion is not None and champion.name == "v000002"
    with pytest.raises(ConfigError, match=names("champion.json sign_key")):
        registry_verb(RegistryJob(path, "rollback", "v000001"))
    for key, outcome in ((public, "v000001"), (others, "signed by another key")):
        job = RegistryJob(path, "rollback", "v000001", sign_key=own, require_signature=key)
        if key == public:
            assert outcome in registry_verb(job)[0]
        else:
            with pytest.raises(DamagedError, match=outcome):
                registry_verb(job)


def test_a_window_that_is_trained_again_is_promoted_beside_what_a_killed_promotion_left(tmp_path: Path) -> None:
    """Where run_dir was lost in between, its bytes are others, and each tick refused them as damaged."""
    _two_versions(str(tmp_path / "registry"), tmp_path)
    registry, ledger = Registry(str(tmp_path / "registry")), Ledger(str(tmp_path / "registry"))
    pointer = registry.pointer()
    first = candidate(finished(tmp_path / "first", b"first"), "w3", "v000002", pointer)
    registry.publish("v000003", first.run.files(), promotion.lineage_of(first))
    second = candidate(finished(tmp_path / "second", b"second"), "w3", "v000002", pointer)
    assert promote(registry, ledger, second, KEEP, lambda: None).version == "v000004"
    champion = registry.champion()
    assert champion is not None and (champion.name, registry.verify(champion)[0]) == ("v000004", "")


def test_a_rollback_gets_away_from_a_damaged_champion_and_a_damaged_pointer(tmp_path: Path) -> None:
    """The error of a damaged champion.json named `registry rollback`, which ended with the same error."""
    path = tmp_path / "registry"
    _two_versions(str(path), tmp_path)
    (path / "versions" / "v000002" / "manifest.json").write_text("{")
    assert "v000001, was v000002" in registry_verb(RegistryJob(registry=str(path), command="rollback"))[0]
    (path / "champion.json").write_text("{")
    with pytest.raises(DamagedError, match=names("rollback VERSION v000001, v000002")):
        registry_verb(RegistryJob(registry=str(path), command="rollback"))
    registry_verb(RegistryJob(registry=str(path), command="rollback", version="v000001"))
    pointer = Registry(str(path)).pointer()
    assert pointer is not None and (pointer.version, pointer.pinned) == ("v000001", True)


def test_a_name_that_leads_out_of_a_run_is_refused_with_its_file(tmp_path: Path) -> None:
    """A run from elsewhere could write anywhere next to the registry that it was added to."""
    run, outside = finished(tmp_path / "run"), "../../../../evil.sh"
    manifest = Path(run.checkpoint) / "manifest.json"
    good = manifest.read_text()
    for values in ({"files": {**run.manifest["files"], outside: checksums_of(__file__)}}, {"attempt": outside}):
        manifest.write_text(seal_manifest({**run.manifest, **values}, Purpose.STEP))
        with pytest.raises(DamagedError, match=names(f"{manifest} {outside}")):
            finished_run(run.folder)
    manifest.write_text(good)
    assert finished_run(run.folder).files()
    dataset = Path(run.data) / "dataset.json"
    values = json.loads(dataset.read_text())
    values["sparse_features"][0]["vocabulary"] = outside
    dataset.write_text(json.dumps(values))
    with pytest.raises(DataError, match=names(f"dataset.json {outside}")):
        finished_run(run.folder)
