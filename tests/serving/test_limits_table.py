"""The serving page lists every limit of the server with its default and a test that there is."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from pipeline.config.serving import BatchingConfig, LimitsConfig

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| `(limits|batching)\.(\w+)` \| (\S+) \|.*\| `(test_\w+)` \|$", re.M)
NO_LIMITS = {"max_rows", "max_delay_ms"}  # how batches are made, which refuses nothing


def test_every_limit_of_the_server_is_in_the_table_with_its_default_and_a_test() -> None:
    rows = ROW.findall((ROOT / "docs" / "do" / "serving.md").read_text())
    sections = {"limits": LimitsConfig(), "batching": BatchingConfig()}
    wanted = {
        (section, each.name) for section, about in sections.items() for each in fields(about) if each.name not in NO_LIMITS
    }  # fmt: skip
    assert {(section, key) for section, key, *_ in rows} == wanted
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for section, key, default, test in rows:
        assert (
            default == f"{getattr(sections[section], key):g}"
            if default != "null"
            else (getattr(sections[section], key) is None)
        ), key
        assert f"def {test}(" in tests, test
