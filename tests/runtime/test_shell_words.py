"""Commands that are printed can be copied into a shell, whatever a path is called."""

from __future__ import annotations

import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from pipeline.runtime.shell_words import command, word

ODD = ["my shop/clicks, new.csv", "it's.csv", 'a "b".csv', "a$HOME.csv", "dt=1/a(1)#b;c&d!.csv", "[a,b].csv", "{x}.csv"]


@pytest.mark.parametrize("path", ["runs/a-b_1.csv", "s3://bucket/d\u00e4ta/x%20.csv", *ODD])
def test_a_word_is_read_back_by_shell_and_hydra(path: str) -> None:
    (typed,) = shlex.split(word("source", path))
    (override,) = OverridesParser.create().parse_overrides([typed])
    assert (override.key_or_group, str(override.value())) == ("source", path)


def test_a_plain_path_stays_as_it_is() -> None:
    assert word("run", "runs/shop") == "run=runs/shop"


def test_a_command_has_the_config_folder_of_the_one_that_names_it() -> None:
    assert command("prepare", ["data=shop"]) == "python -m pipeline prepare"
    for words in (["--config-dir", "my conf", "data=shop"], ["data=shop", "--config-dir", "my conf"]):
        assert command("prepare", words) == "python -m pipeline prepare --config-dir 'my conf'"
    assert command("train", ["--config-dir=conf"]) == "python -m pipeline train --config-dir=conf"
