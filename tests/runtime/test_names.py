"""Names in files become paths below their folder, or are refused."""

from __future__ import annotations

import pytest

from pipeline.runtime.errors import DamagedError
from pipeline.runtime.storage.manifest import path_below
from tests.support.messages import names


@pytest.mark.parametrize("name", ["a", "tables/00000.rows", ".metadata", "vocabulary/%2E%2E ünï.parquet", "a..b/...c"])
def test_a_name_is_a_path_below_its_folder(name: str) -> None:
    assert path_below("s3://bucket/run", name, "manifest.json") == f"s3://bucket/run/{name}"


@pytest.mark.parametrize(
    "name", ["", "/etc/passwd", "..", "a/../../b", "a//b", "./a", "a/", "a\\b", "s3://b/c", "a\nb", "a\x00", "a\x1b[0m", "x" * 1025, 5, None]
)  # fmt: skip
def test_a_name_that_leads_elsewhere_is_refused_with_the_file_that_gives_it(name: object) -> None:
    with pytest.raises(DamagedError, match=names("run/manifest.json")):
        path_below("folder", name, "run/manifest.json")
