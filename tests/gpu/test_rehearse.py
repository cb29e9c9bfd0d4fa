"""rehearse: ranks of a world that this machine could not hold, each alone, on shadow GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.cli.command_line import load_config
from pipeline.data.dataset import load_dataset
from pipeline.extras.shadow.rehearsal import rehearse as rehearsal
from pipeline.extras.shadow.rehearsal.rehearse import RehearsalError, RehearseJob, check_job, describe, rehearse
from pipeline.extras.shadow.rehearsal.stand_in import write_stand_in
from pipeline.runtime.errors import UserError
from pipeline.training.preflight import load_or_describe

BASE = [
    "experiment=quickstart",
    "hardware=h100_80gb",
    "world_size=16",
    "trainer.global_batch_size=256",
    "planner.timeout_s=2",
]


def test_two_ranks_of_sixteen_start_and_have_the_same_collectives(prepared_clicks: str, tmp_path: Path) -> None:
    words = [
        *BASE,
        "ranks=[15]",
        f"data.path={prepared_clicks}",
        "planner=torchrec",
        f"output={tmp_path / 'found.json'}",
    ]
    result = rehearse(load_config(RehearseJob, words))
    first, last = result.ranks
    assert (first["rank"], last["rank"]) == (0, 15) and first["order"] == last["order"]
    assert first["problems"] == last["problems"] == []
    assert first["step"]["launches"] > 50 and first["step"]["copied_bytes"] > 0
    assert {each["op"] for each in first["collectives"]} >= {"alltoall_base_", "allreduce_"}
    assert 0 < first["memory"]["tables, layers and their state"] < first["peak_bytes"] < first["card_bytes"]
    text = describe(result)
    assert "2 of 16 ranks" in text and "the same on all of them" in text
    assert json.loads((tmp_path / "found.json").read_text())["ranks"] == result.ranks


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trainer.global_batch_size=250"], ["250", "16"]),
        (["hardware=cpu"], ["no GPU"]),
        (["ranks=[16]"], ["16", "0 to 15"]),
        (["steps=1"], ["steps", "2"]),
    ],
)
def test_mistakes_are_found_before_a_rank_starts(prepared_clicks: str, words: list[str], said: list[str]) -> None:
    with pytest.raises(UserError) as error:
        check_job(load_config(RehearseJob, [*BASE, f"data.path={prepared_clicks}", *words]))
    assert all(text in str(error.value) for text in said)


def test_a_ranks_user_error_is_the_errors_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(words: list[str], **options: object) -> None:
        folder, rank = Path(words[-1]), words[-2]
        (folder / f"rank{rank}.json").write_text(json.dumps({"user_error": "tables need 97.4 GiB, there are 79.0"}))

    monkeypatch.setattr(rehearsal.subprocess, "run", end)
    words = [*BASE, "data=criteo_1tb_mlperf", "tables=mlperf_dlrmv2", f"data.path={tmp_path / 'none'}"]
    with pytest.raises(RehearsalError, match=r"^rank 0: tables need 97.4 GiB, there are 79.0$"):
        rehearse(load_config(RehearseJob, words))


def test_the_stand_in_reads_as_a_data_set_of_the_config(tmp_path: Path) -> None:
    words = [*BASE, "data=criteo_1tb_mlperf", "tables=mlperf_dlrmv2", f"data.path={tmp_path / 'none'}"]
    described = load_or_describe(load_config(RehearseJob, words))
    write_stand_in(described, str(tmp_path / "data"), {"train": 300, "validation": 100})
    made = load_dataset(str(tmp_path / "data"))
    assert made.splits["train"].num_rows == 300 and made.sparse_feature_names == described.sparse_feature_names
    assert [each.cardinality for each in made.sparse_features] == [
        each.cardinality for each in described.sparse_features
    ]
