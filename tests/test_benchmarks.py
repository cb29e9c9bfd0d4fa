"""What the benchmarks compute from what they measure."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks import ceilings, gpu_host, growth, quality, quality_data
from benchmarks.comms import promised
from benchmarks.compression import Row, report
from benchmarks.startup import show, timed
from benchmarks.startup_rank import IMPORTED, STAGES
from benchmarks.threads import section_of, sections
from pipeline.extras.step_time.data_sheet import SHARDING_CALLS, STEP_CALLS


def test_a_stage_counts_from_the_end_of_the_one_before() -> None:
    marks = [(stage, 100.0 + 2 * number, 0.5 * number) for number, stage in enumerate(STAGES, start=1)]
    found = timed(marks, 100.0, 2, "warm")
    assert set(found.clock.values()) == {2.0}
    assert set(found.cpu.values()) == {0.5}
    assert found.total == pytest.approx(2.0 * len(STAGES))
    assert f"{found.total:.2f} s" in show([found]).splitlines()[-1]


def test_a_bf16_step_may_take_the_methods_of_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without bf16 instructions multiplies bf16 slowly; its steps are faster than such products."""
    monkeypatch.setattr(ceilings, "product_ms", lambda *shape: 5.0 if shape[-1] == torch.bfloat16 else 1.0)
    monkeypatch.setattr(ceilings, "dots_ms", lambda preset, dtype: 5.0 if dtype == torch.bfloat16 else 1.0)
    preset = ceilings.PRESETS["kaggle_16"]
    num_products = 3 * len(ceilings.layers(preset)) - 1
    assert ceilings.dense_ms(preset) == {"fp32": num_products + 1, "bf16": num_products + 1}


def test_a_launch_is_timed_over_what_a_training_imports() -> None:
    source = (Path(__file__).parents[1] / "pipeline" / "training" / "train.py").read_text()
    assert [name for name in IMPORTED if f"\nfrom pipeline.{name} import" not in source] == []


def test_what_a_precision_promises_depends_on_the_collective() -> None:
    assert promised("int8:fp16", "table_wise") == (3.2, 2.0)
    assert promised("int8:bf16", "row_wise") == (2.0, 2.0)
    assert promised("fp32:fp32", "column_wise") == (1.0, 1.0)


def test_compressed_tables_are_compared_to_the_hash_of_their_own_seed() -> None:
    rows = [Row("full", 1, seed, 10, 0, 2**20, auc=0.80, ne=0.7, cpu_s=2.0) for seed in (0, 1)] + [
        Row(kind, 4, seed, 10, 2**18, 2**20, auc=auc + seed / 100, ne=0.7, cpu_s=1.0)
        for kind, auc in (("hash", 0.75), ("tensor_train", 0.76))
        for seed in (0, 1)
    ]
    text = report([*rows, Row("mixed_dimension", 4, 0, 10, problem="cannot")])
    assert "| tensor_train | 0.25 | 0.7650 | -0.0350 | +0.0100 (+0.0100 .. +0.0100) | 0.7000 | x 0.50 |" in text
    assert "| mixed_dimension | cannot be so small |" in text
    assert "quotient_remainder" not in text


def test_quality_compares_means_over_seeds_and_counts_the_deep_models() -> None:
    def result(system: str, model: str, seed: int, auc: float) -> dict[str, object]:
        return {
            "system": system,
            "set": "clicks",
            "model": model,
            "seed": seed,
            "auc": auc,
            "logloss": 0.5,
            "best_epoch": 2,
            "samples_per_cpu_s": 3000.0 if system == "ours" else 2000.0,
        }

    aucs = {"FuxiCTR": {"FM": 0.70, "DLRM": 0.72}, "ours": {"FM": 0.71, "DLRM": 0.75}}
    results = [
        result(system, model, seed, auc + seed / 100)
        for system, models in aucs.items()
        for model, auc in models.items()
        for seed in (0, 2)
    ]
    found = quality.figures([*results, result("ours", "LR", 0, 0.6)])
    assert [figure["model"] for figure in found] == ["FM", "DLRM"], "one side alone is no comparison"
    assert found[0]["AUC_FuxiCTR"] == "0.7100 (0.0141)" and found[0]["AUC_here"] == "0.7200 (0.0141)"
    assert (found[0]["difference"], found[0]["standard_error"]) == ("+0.0100", "0.0141")
    assert found[0]["samples_per_CPU_second,_ratio"] == "1.50"
    assert quality.mean_differences(found) == {"mean difference on clicks": "+0.0300 (1 deep models)"}


def read_splits(folder: Path) -> dict[str, list[dict[str, str]]]:
    splits = {}
    for name in ("train", "valid", "test"):
        with (folder / f"{name}.csv").open(newline="") as file:
            splits[name] = list(csv.DictReader(file))
    return splits


def test_quality_splits_criteos_rows_once_and_discretises_its_integers(tmp_path: Path) -> None:
    rows = [
        f"{number % 2}\t" + "\t".join(["100", "", "2"] + ["-1"] * 10 + ["ab"] * 25 + [str(number)])
        for number in range(20)
    ]
    (tmp_path / "train.txt").write_text("\n".join(rows) + "\n")
    quality_data.make_criteo(tmp_path / "criteo", tmp_path / "train.txt")
    splits = read_splits(tmp_path / "criteo")
    assert [len(split) for split in splits.values()] == [14, 2, 4]
    assert sorted(int(row["C26"]) for split in splits.values() for row in split) == list(range(20))
    assert {row[name] for row in splits["train"] for name in ("I1", "I2", "I3", "I4")} == {"21", "missing", "2", "-1"}
    assert quality.load_spec(tmp_path / "criteo")["dim"] == quality.SPEC["dim"]


def test_quality_tests_a_users_last_item_against_one_that_the_user_does_not_have(tmp_path: Path) -> None:
    (tmp_path / "items.txt").write_text("1 11 12 13 14\n2 21 22 23\n")
    (tmp_path / "attributes.json").write_text(json.dumps({"14": [7, 8]}))
    quality_data.make_sequences(tmp_path / "data", tmp_path / "items.txt", tmp_path / "attributes.json")
    splits = read_splits(tmp_path / "data")
    clicked = {name: [row["item"] for row in rows if row["click"] == "1"] for name, rows in splits.items()}
    assert sorted(clicked["train"]) == ["11", "12", "21"]
    assert (clicked["valid"], clicked["test"]) == (["13", "22"], ["14", "23"])
    others = [(row["user"], row["item"]) for rows in splits.values() for row in rows if row["click"] == "0"]
    assert len(others) == 7 and all(user != item[0] for user, item in others)  # items of user 1 are 11 to 14
    last = splits["test"][0]
    assert (last["history"], last["categories"]) == ("11|12|13", "7|8")


def test_quality_takes_a_movielens_rating_of_4_as_a_click_and_earlier_clicks_as_its_history(tmp_path: Path) -> None:
    tables = {
        "inter": ["1\t7\t4\t300", "1\t8\t3\t200", "1\t9\t5\t100"],
        "user": ["1\t24\tM\ttechnician\t85711"],
        "item": [f"{item}\tname\t1995\tComedy Drama" for item in (7, 8, 9)],
    }
    for name, lines in tables.items():
        (tmp_path / name).write_text("\n".join(["header", *lines]) + "\n")
    quality_data.make_ml100k(tmp_path / "ml", *(tmp_path / name for name in tables))
    rows = {row["item_id"]: row for split in read_splits(tmp_path / "ml").values() for row in split}
    assert {item: (row["click"], row["history"]) for item, row in rows.items()} == {
        "9": ("1", ""), "8": ("0", "9"), "7": ("1", "9"),
    }  # fmt: skip
    assert rows["7"]["genres"] == "Comedy|Drama" and quality.load_spec(tmp_path / "ml_histories")["histories"]


def test_the_exponent_of_growth_leaves_out_what_every_size_costs() -> None:
    sizes = [1000, 10_000, 100_000]
    for power in (0.5, 1.0, 2.0):
        # n0 is small beside the others, so that powers of differences are nearly differences of powers.
        found = growth.exponent([1, 10**6, 10**8], [5.0 + 3 * size**power for size in (1, 10**6, 10**8)])
        assert found == pytest.approx(power, abs=0.01)
    assert growth.exponent(sizes, [5.0, 5.1, 6.0]) is None
    assert growth.exponent([26, *sizes], [30.0, 5.0, 14.0, 104.0]) == pytest.approx(1.0)  # from the cheapest on
    assert math.isnan(growth.exponent(sizes[:2], [1.0, 9.0]) or 0.0)


def test_growth_names_curves_that_are_steeper_than_they_may_be() -> None:
    points = [growth.Point("save", size, seconds, 10.0) for size, seconds in ((1, 0.0), (10, 0.1), (100, 10.0))]
    line = growth.report(points).splitlines()[-1]
    assert line.startswith("| save | 1, 10, 100 rows") and line.endswith("| 1.92 (!) | 10, 10, 10 | flat |")
    assert "(!)" not in growth.report([*points[:2], growth.Point("save", 100, 1.0, 10.0)])


def test_of_repeated_points_of_growth_the_least_time_and_the_most_memory_count() -> None:
    points = [growth.Point("save", 1, 2.0, 50.0), growth.Point("load", 1, 9.0, 9.0)]
    points = growth.merged(points, growth.Point("save", 1, 3.0, 40.0))
    points = growth.merged(points, growth.Point("save", 2, 4.0, 60.0))
    assert points == [
        growth.Point("save", 1, 2.0, 50.0),
        growth.Point("load", 1, 9.0, 9.0),
        growth.Point("save", 2, 4.0, 60.0),
    ]


def test_what_a_second_thread_does_not_shorten_is_serial() -> None:
    one, two = (
        {"shared": 4.0, "half": 4.0, "alone": 1.0, "woken": 0.1},
        {"shared": 2.0, "half": 3.0, "alone": 1.0, "woken": 0.5},
    )
    found = {each.name: each.serial_percent for each in sections("tiny", "fp32", one, {**two, "": 10.0})}
    assert found == pytest.approx({"half": 20.0, "alone": 10.0, "woken": 5.0, "shared": 0.0})
    assert list(found) == ["half", "alone", "woken", "shared"]
    assert section_of("autograd::engine::evaluate_function: _StackBackward") == "_StackBackward"


def test_calls_of_a_step_are_those_that_the_planner_assumes() -> None:
    rows = [row for row in json.loads(gpu_host.RESULTS.read_text())["rows"] if row["side"] == "ours"]
    # Of the layers as pipeline.extras.step_time.recorded_layers records them: with a kernel, and without.
    layers = {"quickstart": (51, 80), "kaggle_64": (57, 90), "dlrmv2": (97, 135)}
    for row in rows:
        launches, others = (
            layers[row["preset"]][index] + STEP_CALLS[index] + len(gpu_host.KINDS[row["kinds"]]) * SHARDING_CALLS[index]
            for index in (0, 1)
        )
        assert launches == pytest.approx(row["launches"] + row["collectives"], rel=0.08)
        assert others == pytest.approx(row["calls"], rel=0.08)
