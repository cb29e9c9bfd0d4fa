"""Commands that are printed can be copied into a shell, whatever a path is called."""

from __future__ import annotations

import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from pipeline.runtime.shell_words import word

ODD = ["my shop/clicks, new.csv", "it's.csv", 'a "b".csv', "a$HOME.csv", "dt=1/a(1)#b;c&d!.csv", "[a,b].csv", "{x}.csv"]


@pytest.mark.parametrize("path", ["runs/a-b_1.csv", "s3://bucket/d\u00e4ta/x%20.csv", *ODD])
def test_a_word_is_read_back_by_shell_and_hydra(path: str) -> None:
    (typed,) = shlex.split(word("source", path))
    (override,) = OverridesParser.create().parse_overrides([typed])
    assert (override.key_or_group, str(override.value())) == ("source", path)


def test_a_plain_path_stays_as_it_is() -> None:
    assert word("run", "runs/shop") == "run=runs/shop"
