"""docs/reference/ has every key of every verb, with what it means, and `-h KEY` says it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from pipeline.cli.command_line import explain_key, parse_command_line
from pipeline.cli.compose import config_folders
from pipeline.cli.reference import keys_of, model_keys
from pipeline.config.jobs.job import CONFIG_NAMES
from pipeline.config.jobs.prepare import PrepareJob
from pipeline.config.jobs.train import TrainJob
from pipeline.runtime.errors import ConfigError
from tests.support.messages import mentions, names

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_reference", DOCS / "write_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_are_what_the_script_writes(writer: ModuleType) -> None:
    folder, pages = DOCS / "reference", writer.render()
    files = {path: (folder / path).read_text() for path in pages if (folder / path).exists()}
    assert files == pages, "run python docs/write_reference.py"
    there = {path.relative_to(folder).as_posix() for path in folder.glob("*/*.md")}
    assert there == {path for path in pages if "/" in path}


def test_every_key_of_every_verb_has_a_meaning_and_stands_on_the_page(writer: ModuleType) -> None:
    """The comment behind it in conf/ is its meaning."""
    page, conf = "".join(writer.render().values()), config_folders()  # which imports all verbs
    keys = [key for job, verb in CONFIG_NAMES.items() for key in keys_of(job, verb, conf)]
    keys = [key for key in keys if not key.name.startswith("model.")]
    keys += [key for of_model in model_keys(conf).values() for key in of_model]
    shipped = [key for key in keys if "test" not in key.name]  # plugins of tests register verbs of their own
    assert len({key.name for key in shipped}) > 250
    assert [key.name for key in shipped if not key.meaning and f"| `{key.name}` " in page] == []
    own = {key.name for job in (TrainJob, PrepareJob) for key in keys_of(job, CONFIG_NAMES[job], conf)}
    assert [name for name in own if not name.startswith("model.") and f"| `{name}` " not in page] == []


def test_help_explains_a_key_and_a_section(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_command_line(TrainJob, "", ["-h", "optimizer.dense.lr"])
    assert end.value.code == 0
    assert mentions(capsys.readouterr().out, "optimizer.dense.lr = 0.001 number learning rate")
    assert mentions(explain_key("trainer.early_stop", TrainJob), "patience metric min_delta")
    assert mentions(explain_key("tables.cat_3.pooling", TrainJob), "sum or mean")
    assert mentions(explain_key("model.dropout", TrainJob), "(model=deepfm) (model=masknet)")
    with pytest.raises(ConfigError, match=names("optimizer.dense.lr")):
        explain_key("lr", TrainJob)
    with pytest.raises(ConfigError, match=r"did you mean optimizer\.dense\.lr or optimizer\.sparse\.lr or tables"):
        explain_key("learning_rate", TrainJob)  # words of the meaning
    assert mentions(explain_key("model.dropout", TrainJob), "0.0 share")
    assert mentions(explain_key("threads", PrepareJob), "null all cores")
    with pytest.raises(ConfigError, match=names("'trainer.sed' 'trainer.seed'")):
        explain_key("trainer.sed", TrainJob)


def test_the_index_of_decisions_is_what_the_script_writes() -> None:
    spec = importlib.util.spec_from_file_location("write_adr_index", DOCS / "write_adr_index.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (DOCS / "adr" / "README.md").read_text() == module.render(), "run python docs/write_adr_index.py"
    assert module.status_of("Status: replaced by [ADR 65](x.md): why") == "replaced by [ADR 65](x.md)"
