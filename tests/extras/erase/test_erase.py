"""After an erasure no file of a registry has the user or the user's rows, and no other score has changed."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.checkpoint.chains import open_step, open_tensors
from pipeline.checkpoint.steps import is_packed, list_steps, read_manifest, step_path
from pipeline.checkpoint.tables import inventory_of_step
from pipeline.cli.command_line import load_config
from pipeline.cli.registry import rollback
from pipeline.config.jobs.prepare import PrepareJob
from pipeline.config.jobs.retrain import RegistryJob
from pipeline.data.dataset import load_dataset
from pipeline.data.prepare.run import prepare
from pipeline.data.raw.hashing import hash_text
from pipeline.extras.checkpoints.survey import verify_step
from pipeline.extras.differential.packed import PackedFile
from pipeline.extras.erase.config import EraseJob
from pipeline.extras.erase.datasets import id_of
from pipeline.extras.erase.folders import EraseError
from pipeline.extras.erase.run import describe, erase
from pipeline.extras.erase.target import Target
from pipeline.retraining.find_artifact import find_artifact
from pipeline.retraining.ledger import Ledger
from pipeline.retraining.registry import Registry
from pipeline.runtime.storage.signature import requiring, signing
from pipeline.serving.scoring.predictor import Predictor
from tests.extras.erase.worlds import NAMES, USER, make_world, rows_of, train_to
from tests.support.forks import WarmCommand

pytestmark = pytest.mark.long
ARTIFACTS = ("artifact", "registry/versions/v000001/artifact", "registry/versions/v000002/artifact")
DATA = ("rows.parquet", "ds", "run", "artifact", "logs")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A world, and a copy of it next to it. Its config names its path, so tests put the copy back."""
    folder = tmp_path_factory.mktemp("erase") / "world"
    folder.mkdir()
    make_world(folder)
    shutil.copytree(folder, folder.parent / "copy")
    return folder


@pytest.fixture
def world(pristine: Path) -> Path:
    shutil.rmtree(pristine)
    shutil.copytree(pristine.parent / "copy", pristine)
    return pristine


def words_of(world: Path) -> list[str]:
    return [
        "feature=user", f"value='{USER}'", f"registry={world}/registry",
        f"folders=[{','.join(f'{world}/{name}' for name in DATA)}]",
        f"sign_key={world}/keys/key.pem", f"require_signature={world}/keys/key.pub",
    ]  # fmt: skip


def scores_of(path: Path, names: list[str]) -> np.ndarray:
    predictor = Predictor.load(str(path))
    predictor.catch_up(str(path))
    prices = np.tile(np.linspace(0, 1, 5), len(names))
    users = [name for name in names for _ in range(5)]
    return predictor.score(pa.table({"price": prices, "user": users, "item": ["i3"] * len(users)})).scores


def rows_of_user(world: Path) -> set[bytes]:
    """The user's row in each step of the run and in each artifact, read without the erasing code."""
    dataset = load_dataset(str(world / "ds"))
    row = id_of(str(world / "ds"), dataset.sparse_feature("user"), USER)
    assert row is not None
    found = set()
    for step in list_steps(str(world / "run/checkpoints")):
        tensors = open_tensors(step_path(str(world / "run/checkpoints"), step))
        table = inventory_of_step(tensors).tables["user"]
        found.add(tensors.read(table.key, [row, 0], [1, table.dim]).numpy().tobytes())
    for path in ARTIFACTS:
        predictor = Predictor.load(str(world / path))
        number = next(each.table for each in predictor.lookup.features if each.name == "user")
        found.add(predictor.lookup.stored(number, predictor_ids(row))[0].numpy().tobytes())
        predictor.catch_up(str(world / path))
        found.add(predictor.lookup.stored(number, predictor_ids(row))[0].numpy().tobytes())
    return found


def predictor_ids(row: int):  # type: ignore[no-untyped-def]
    import torch

    return torch.tensor([row])


def contents(world: Path) -> dict[Path, bytes]:
    """The bytes of every file, decoded by other code than the scan's."""
    found = {}
    for path in sorted(each for each in world.rglob("*") if each.is_file() and "keys" not in each.parts):
        content = path.read_bytes()
        if content[:4] == b"PAR1":
            content += str(pq.read_table(path).to_pylist()).encode()
        elif content[:6] == b"ARROW1":
            with pa.ipc.open_file(path) as file:
                content += str(file.read_all().to_pylist()).encode()
        elif path.suffix == ".gz":
            content += gzip.decompress(content)
        elif path.suffix == ".z":
            content += zlib.decompress(content)
        elif path.suffix == ".distcp" and is_packed(read_manifest(str(path.parent))):
            with path.open("rb", buffering=0) as file:
                content += PackedFile(file, len(content), str(path)).read()
        found[path] = content
    return found


def holding(world: Path, patterns: set[bytes]) -> list[Path]:
    return [path for path, content in contents(world).items() if any(each in content for each in patterns)]


def test_no_byte_of_the_user_stays_and_nobody_else_moves(world: Path) -> None:
    rows = rows_of_user(world)
    names = {USER.encode(), json.dumps(USER)[1:-1].encode(), USER.replace('"', '\\"').encode()}
    names |= {USER.replace('"', '""').encode(), USER.encode("utf-16-le")}
    before = {path: scores_of(world / path, [*NAMES, "nobody"]) for path in ARTIFACTS}
    held = holding(world, rows | names)
    assert len(rows) >= 5 and len(held) >= 15
    result = erase(load_config(EraseJob, words_of(world)))
    assert result.left == {} and result.num_rows >= 5 and result.num_steps == 6
    assert holding(world, rows | names) == []
    with requiring(f"{world}/keys/key.pub"):
        for path in ARTIFACTS:
            after = scores_of(world / path, [*NAMES, "nobody"])
            assert (after[5:] == before[path][5:]).all() and (after[:5] == after[-5:]).all()
            assert (after[:5] != before[path][:5]).any()
            tables = Predictor.load(str(world / path)).feature_tables
            assert tables is not None
            filled = tables.fill(pa.table({"user": [USER, NAMES[1], NAMES[23]]}))
            assert filled["price"].to_pylist() == [None, 1 / 24, 23 / 24]
        registry = Registry(str(world / "registry"))
        assert [registry.verify(version)[0] for version in registry.versions()] == ["", ""]
        folder = str(world / "run/checkpoints")
        assert [verify_step(folder, step) for step in list_steps(folder)] == [""] * 4
    record = next(Ledger(registry.path).newest())
    assert record.state == "erased" and record.data["digest"] == result.digest and USER not in json.dumps(record.data)
    lines = "\n".join(describe(load_config(EraseJob, words_of(world)), result))
    assert "ledger      record 3" in lines and result.receipt in lines


def test_resume_and_rollback_do_not_restore_the_user(world: Path) -> None:
    shards = {path.name: pq.read_table(path) for path in sorted((world / "ds/train").iterdir())}
    row = id_of(str(world / "ds"), load_dataset(str(world / "ds")).sparse_feature("user"), USER)
    erase(load_config(EraseJob, words_of(world)))
    for name, table in shards.items():
        now = pq.read_table(world / "ds/train" / name)
        own = table["user"].to_numpy() == row
        assert own.any() and (now["user"].to_numpy()[own] == 0).all() and (now["__group__"].to_numpy()[own] == 0).all()
        assert now.filter(pa.array(~own)).equals(table.filter(pa.array(~own)))
    with signing(f"{world}/keys/key.pem"), requiring(f"{world}/keys/key.pub"):
        _, _, before = open_step(str(world / "run/checkpoints"), None)
        table = inventory_of_step(before).tables["user"]
        erased = before.read(table.key, [row, 0], [1, table.dim])
        assert (erased == before.read(table.key, [0, 0], [1, table.dim])).all()
        train_to(world, 25)
        step, _, after = open_step(str(world / "run/checkpoints"), None)
        assert step == 25 and (after.read(table.key, [row, 0], [1, table.dim]) == erased).all()
        assert [float(after.read(each.key, [row], [1])) for each in table.states.values()] == [0.0]
        rollback(RegistryJob(registry=f"{world}/registry", command="rollback"))
        champion = find_artifact(f"{world}/registry").path
        assert champion.endswith("v000001/artifact")
        assert (scores_of(Path(champion), [USER]) == scores_of(Path(champion), ["nobody"])).all()
    again = erase(load_config(EraseJob, words_of(world)))
    assert again.left == {} and again.rewritten == []


def test_killed_erasure_is_finished_by_the_same_command(world: Path, pristine: Path) -> None:
    rows, wanted = rows_of_user(world), None
    for left in (0, 1, 2, 5, 7, 40):
        if left:
            shutil.rmtree(world)
            shutil.copytree(pristine.parent / "copy", world)
        ended = WarmCommand("tests.extras.erase.kill_worker", [left, *words_of(world)], output=(1, 2)).wait(120)
        result = erase(load_config(EraseJob, words_of(world)))
        assert result.left == {} and holding(world, rows | {USER.encode()}) == []
        assert not [path for path in world.rglob(".erase*") if path.exists()]
        found = [scores_of(world / path, NAMES).tobytes() for path in ARTIFACTS]
        wanted = wanted or found
        assert found == wanted
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
    assert left == 40, "the worker was killed at several renames"


def test_step_of_an_unknown_data_set_and_hashed_ids_change_nothing(world: Path) -> None:
    before = contents(world)
    words = [f"folders=[{world}/run]" if word.startswith("folders") else word for word in words_of(world)]
    with pytest.raises(EraseError, match="in none of the given folders"):
        erase(load_config(EraseJob, [word for word in words if not word.startswith("registry")]))
    path = world / "ds/dataset.json"
    text = path.read_text()
    path.write_text(text.replace('"hash_size": null,\n   "mean', '"hash_size": 1000,\n   "mean'))
    with pytest.raises(EraseError, match="shares its row with every"):
        erase(EraseJob(feature="user", value=USER, folders=[str(world / "ds")]))
    path.write_text(text)
    assert {at: content for at, content in contents(world).items() if ".lease" not in str(at)} == {
        at: content for at, content in before.items() if ".lease" not in str(at)
    }


def test_group_of_a_user_who_is_no_feature_is_erased(tmp_path: Path) -> None:
    rows = rows_of(300)
    pq.write_table(rows, tmp_path / "rows.parquet")
    data = [
        "data=default", "data.name=small", "data.format=parquet", "data.columns.label=click", "data.columns.dense=[price]",
        "data.columns.sparse=[item]", "data.group_column=user", "data.split={kind: random, validation_fraction: 0, test_fraction: 0}",
    ]  # fmt: skip
    prepare(
        load_config(PrepareJob, [*data, f"data.path={tmp_path}/ds", f"source={tmp_path}/rows.parquet", "threads=1"])
    )
    (tmp_path / "ds/quarantine.jsonl").write_text(json.dumps({"row": 3, "reason": f"user {USER}"}) + "\n")
    (shard,) = (tmp_path / "ds/train").iterdir()
    before = pq.read_table(shard)
    words = ["feature=user", f"value='{USER}'", f"folders=[{tmp_path}]"]
    result = erase(load_config(EraseJob, words))
    assert result.left == {} and result.without_feature == [] and len(result.rewritten) == 3
    group, after = before["__group__"].to_numpy(), pq.read_table(shard)
    own = group == hash_text(pa.array([USER]), 0).view(np.int64)[0]
    assert own.sum() == rows["user"].to_pylist().count(USER) > 0
    assert (after["__group__"].to_numpy() == np.where(own, 0, group)).all()
    assert after.drop_columns("__group__").equals(before.drop_columns("__group__"))
    assert load_dataset(str(tmp_path / "ds")).splits["train"].num_rows == 300
    assert erase(load_config(EraseJob, words)).rewritten == []


def test_value_in_a_file_that_cannot_be_rewritten_is_named(world: Path) -> None:
    (world / "logs/dump.bin").write_bytes(b"\x00\x01" + USER.encode("utf-16-le") + b"\x00")
    result = erase(load_config(EraseJob, words_of(world)))
    assert result.left == {str(world / "logs/dump.bin"): "the value"} and result.record == 0
    os.remove(world / "logs/dump.bin")
    assert erase(load_config(EraseJob, words_of(world))).left == {}


def test_tombstones_differ_from_the_value_and_are_equal_in_copies() -> None:
    one, two = Target("user", "7"), Target("user", "8")
    assert one.tombstone(3) == two.tombstone(3) != one.tombstone(4)
