"""The nodes of a job are measured by its own process group, and what would spoil a run is said."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from pipeline.devices.process_group import init_distributed
from pipeline.extras.nodes import shared_folder
from pipeline.extras.nodes.check import (
    Limits,
    NodeFacts,
    NodesReport,
    check_nodes,
    describe,
    find_problems,
    gpu_problems,
    parse_gpus,
)
from pipeline.extras.nodes.links import Link, clock_offsets, rounds_of_pairs
from tests.support.ranks import RankPool

WELL = "0, H100, 570, 81559, 10, 0, 40, Not Active\n"
FAR_FROM_ANY = 3600.0  # a limit that no scheduling delay of a busy machine passes


def _check(rank: int, folder: str) -> NodesReport:
    return check_nodes(init_distributed(), folder, 0.5, Limits(max_clock_skew_s=FAR_FROM_ANY))


def _skewed(rank: int) -> dict[int, tuple[float, float]]:
    return clock_offsets(init_distributed(), [0, 1, 2], lambda: time.time() + 1000.0 * rank)


def _folders_of_their_own(rank: int, folder: str) -> list[str]:
    with patch.object(shared_folder, "SEEN_WITHIN_S", 0.3):
        Path(folder, str(rank)).mkdir()
        return shared_folder.check_folder(init_distributed(), f"{folder}/{rank}").problems


def _without_exclusive_creation(rank: int, folder: str) -> list[str]:
    with patch.object(shared_folder.os, "O_EXCL", 0):
        return shared_folder.check_folder(init_distributed(), folder).problems


def test_two_nodes_are_measured_in_both_directions(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(2, _check, str(tmp_path), local_world_size=1)
    assert first.to_json() == second.to_json()
    assert [(link.source, link.target) for link in first.links] == [(0, 1), (1, 0)]
    assert all(link.bytes_per_s > 0 and link.latency_s > 0 for link in first.links)
    assert first.all_to_all_bytes_per_s > 0 and set(first.clocks) == {0, 1}
    assert first.folder is not None and first.folder.write_bytes_per_s > 0
    assert first.problems == [] and list(tmp_path.iterdir()) == []
    assert json.loads(first.to_json())["nodes"]["1"]["versions"]["torch"]
    text = describe(first)
    assert "from \\ to" in text and text.endswith("all is well")


def test_ranks_of_one_node_are_one_node(ranks: RankPool) -> None:
    report, _ = ranks.run(2, _check, "")
    assert list(report.nodes) == [0] and report.links == [] and report.folder is None
    assert "no link between nodes" in describe(report)


def test_a_clock_that_is_ahead_is_found(ranks: RankPool) -> None:
    offsets = ranks.run(3, _skewed)[2]
    for rank in (0, 1, 2):
        offset, bound = offsets[rank]
        assert abs(offset - 1000.0 * rank) <= bound + 1e-3


def test_folders_that_are_not_shared_are_found(ranks: RankPool, tmp_path: Path) -> None:
    (problem,), _ = ranks.run(2, _folders_of_their_own, str(tmp_path))
    assert "rank(s) 1 did not see" in problem


def test_a_file_system_without_exclusive_creation_is_found(ranks: RankPool, tmp_path: Path) -> None:
    (problem,), _ = ranks.run(2, _without_exclusive_creation, str(tmp_path))
    assert problem.startswith("exclusive creation: 2 ranks")


def test_a_folder_that_cannot_be_written_is_one_problem(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    reports = ranks.run(2, _check, str(tmp_path / "file"))
    assert [len(report.problems) for report in reports] == [1, 1] and "Not a directory" in reports[0].problems[0]


def test_a_torn_read_is_told(tmp_path: Path) -> None:
    path, seen = tmp_path / "file", set()
    assert "No such file" in shared_folder.read_whole(path, seen)
    path.write_bytes(b"a" * shared_folder.PIECE)
    assert shared_folder.read_whole(path, seen) == "" and seen == {ord("a")}
    path.write_bytes(b"a" * (shared_folder.PIECE - 1) + b"b")
    assert "2 different" in shared_folder.read_whole(path, seen)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8])
def test_rounds_pair_each_two_once_and_nobody_twice_at_a_time(count: int) -> None:
    members = [10 * member for member in range(count)]
    rounds = rounds_of_pairs(members)
    assert sorted(tuple(sorted(pair)) for pairs in rounds for pair in pairs) == list(itertools.combinations(members, 2))
    for pairs in rounds:
        taking_part = [member for pair in pairs for member in pair]
        assert len(taking_part) == len(set(taking_part))
    assert len(rounds) <= count


def _report(num_nodes: int = 4, **changes: object) -> NodesReport:
    nodes = {rank: NodeFacts(f"node{rank}", 8, 64.0, {"torch": "2.13.0"}) for rank in range(num_nodes)}
    links = [Link(a, b, 10e9, 20e-6) for a in nodes for b in nodes if a != b]
    report = NodesReport(num_nodes, "gloo", 64.0, nodes, links, 8e9, dict.fromkeys(nodes, (0.0, 1e-4)))
    return replace(report, **changes)


def test_equal_nodes_have_no_problem() -> None:
    assert find_problems(_report(), Limits()) == []


def test_a_slow_link_is_named() -> None:
    report = _report()
    report.links[4] = replace(report.links[4], bytes_per_s=4e9)
    (problem,) = find_problems(report, Limits())
    assert "node1 -> node2 4.00" in problem and "1 of 12 links" in problem
    assert find_problems(_report(), Limits(min_gb_per_s=11.0))[0].startswith("12 of 12 links are under 11.00 GB/s")


def test_another_version_a_skewed_clock_and_a_missing_gpu_are_named() -> None:
    report = _report()
    report.nodes[2] = replace(report.nodes[2], versions={"torch": "2.12.0"}, gpus=parse_gpus(WELL))
    report.clocks[3] = (2.5, 1e-4)
    problems = find_problems(report, Limits())
    assert [problem.partition(":")[0] for problem in problems] == [
        "torch differs",
        "node0, node1, node3",
        "the clock of node3 is 2.50 s ahead of the clock of node0, more than 1 s",
    ]


def test_what_nvidia_smi_says_of_a_sick_gpu_is_a_problem() -> None:
    listed = "0, NVIDIA H100, 570.1, 81559, 10, 0, 41, Not Active\n1, NVIDIA H100, 570.1, 81559, 10, 3, 92, Active\n"
    facts = NodeFacts("node0", 8, 64.0, {}, parse_gpus(listed))
    found = gpu_problems(facts)
    assert len(found) == 3 and all(text.startswith("GPU 1 (NVIDIA H100)") for text in found)
    assert gpu_problems(NodeFacts("node0", 8, 64.0, {}, [], "No devices were found")) == ["No devices were found"]


def test_a_large_matrix_is_told_by_its_slowest_links() -> None:
    report = _report(20)
    report.links[7] = replace(report.links[7], bytes_per_s=6e9)
    text = describe(report)
    assert "median 10.00, the slowest:" in text and "rank 0 -> 8: 6.00" in text
