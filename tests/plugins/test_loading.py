"""Plugins come from the command line and from entry points; a saved job names them and never loads them."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from pipeline.cli.command_line import help_text, load_config
from pipeline.cli.compose import load_plugins_of
from pipeline.config import registry
from pipeline.config.jobs.train import PlanJob, TrainJob
from pipeline.config.saved_jobs import load_saved_job, save_job
from pipeline.runtime.errors import ConfigError
from pipeline.training.run_state import folder_of

MODEL = """
from dataclasses import dataclass
from pipeline.config.model import ModelConfig
from pipeline.config.registry import register

@register("model", "{name}")
@dataclass
class Config(ModelConfig):
    kind: str = "{kind}"
    size: int = 3
"""
QUICKSTART = ["data=quickstart", "tables=from_data"]


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a package with one model in a module of its own; both are forgotten in the end."""
    known = dict(registry.components("model"))
    (tmp_path / "shop_plugin").mkdir()
    (tmp_path / "shop_plugin" / "__init__.py").write_text("")
    (tmp_path / "shop_plugin" / "model.py").write_text(MODEL.format(name="shop", kind="shop"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(registry._components, "model", known)
    monkeypatch.setattr(registry, "_loaded", set(registry._loaded))
    yield "shop_plugin"
    for name in [name for name in sys.modules if name.startswith("shop_plugin")]:
        del sys.modules[name]


@pytest.mark.long
def test_a_plugins_model_is_an_option_without_a_file(plugin: str) -> None:
    with pytest.raises(ConfigError, match="model=shop: there is no such option"):
        load_config(TrainJob, [*QUICKSTART, "model=shop"])
    job = load_config(TrainJob, [*QUICKSTART, "model=shop", "model.size=5", f"plugins=[{plugin}]"])
    assert (job.model.kind, vars(job.model)["size"], job.plugins) == ("shop", 5, [plugin])
    assert load_config(PlanJob, [*QUICKSTART, "model=shop", f"plugins=[{plugin}]"]).model.kind == "shop"


def test_help_lists_a_plugins_model(plugin: str) -> None:
    assert "shop" not in help_text(TrainJob, "")
    load_plugins_of([f"plugins=[{plugin}]"])
    assert " shop " in help_text(TrainJob, "")


def test_a_saved_job_says_which_plugin_it_needs_and_imports_nothing(plugin: str, tmp_path: Path) -> None:
    path = str(tmp_path / "config.yaml")
    save_job(load_config(TrainJob, [*QUICKSTART, "model=shop", f"plugins=[{plugin}]"]), path)
    assert load_saved_job(TrainJob, path).model.kind == "shop"
    for name in (plugin, f"{plugin}.model"):
        del sys.modules[name]
    del registry._components["model"]["shop"]
    with pytest.raises(ConfigError, match=r"this run needs plugin shop_plugin.* give plugins=\[shop_plugin\]"):
        load_saved_job(TrainJob, path)
    assert plugin not in sys.modules
    assert folder_of(str(tmp_path)) == f"{tmp_path}/checkpoints"  # needs no plugin


def test_a_saved_jobs_names_are_never_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "config.yaml"
    save_job(load_config(TrainJob, [*QUICKSTART]), str(path))
    text = path.read_text()
    assert "plugins: []" in text and "kind: dlrm" in text
    text = text.replace("plugins: []", "plugins: [trap]", 1)
    path.write_text(text)
    # a plugin is required by what uses it: this one may hold a hook
    assert load_saved_job(TrainJob, str(path)).plugins == ["trap"]
    path.write_text(text.replace("kind: dlrm", "kind: trap.Model", 1))
    with pytest.raises(ConfigError, match="needs plugin trap"):
        load_saved_job(TrainJob, str(path))
    assert "trap" not in sys.modules


def test_an_installed_package_registers_by_its_entry_point(plugin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = importlib.metadata.EntryPoint("shop", f"{plugin}.model", registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry] if group == registry.ENTRY_POINTS else [])
    registry._loaded.discard(registry.ENTRY_POINTS)
    assert load_config(TrainJob, [*QUICKSTART, "model=shop"]).model.kind == "shop"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("plugins=[no_such_plugin]", "cannot import 'no_such_plugin'.*PYTHONPATH"),
        ("plugins=[./my/plugin]", r"PYTHONPATH=./my, plugins=\[plugin\]"),
        ("plugins=[plugin.py]", r"PYTHONPATH=\., plugins=\[plugin\]"),
        ("plugins=no_such_plugin", r"write plugins=\[no_such_plugin\]"),
    ],
)
def test_a_plugin_that_cannot_be_had_is_said(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(TrainJob, [*QUICKSTART, override])


def test_a_kind_that_nothing_looks_for_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'modell', 'mine'.*model, task.*verb.*did you mean 'model'"):
        registry.register("modell", "mine")


def test_two_components_of_one_name_are_refused(plugin: str, tmp_path: Path) -> None:
    (tmp_path / plugin / "model.py").write_text(MODEL.format(name="dlrm", kind="dlrm"))
    with pytest.raises(ConfigError, match=f"^{plugin}.model.* registers model 'dlrm', which is pipeline.models.dlrm"):
        registry.load_plugins([plugin])


def test_a_model_whose_kind_is_another_name_is_refused(plugin: str, tmp_path: Path) -> None:
    (tmp_path / plugin / "model.py").write_text(MODEL.format(name="shop", kind="store"))
    with pytest.raises(ConfigError, match='kind: str = "shop"'):
        registry.load_plugins([plugin])
