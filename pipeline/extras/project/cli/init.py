"""Create your own project:  python -m pipeline init my_project data=clicks.yaml source=clicks.csv

    python -m pipeline inspect source=clicks.csv     writes clicks.yaml, which init copies
    python -m pipeline init                          on a terminal: asks for missing values, and inspects the file

The folder has a conf/ whose options are added to the package's, a Makefile (prepare, train, report, sweep, export,
serve), and a model to change. Existing files are not overwritten.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipeline.cli.command_line import Command, load_config, print_user_errors, quoted, read_arguments
from pipeline.cli.verb import verb
from pipeline.config.jobs.job import Job, job_of
from pipeline.config.jobs.prepare import InspectJob
from pipeline.extras.project.defaults import choose_batch_size, choose_model, estimate_rows
from pipeline.runtime import shell_words
from pipeline.runtime.errors import ConfigError, check_choice, check_given
from pipeline.runtime.process.exit_codes import INTERRUPTED


@job_of("init")
@dataclass
class InitJob(Job):
    """Create `folder` with a copy of the data config `data`, as `inspect` writes it; `source` are
    the raw rows."""

    folder: str = "???"
    data: str = "???"
    source: str = "???"
    command: str = "make"  # the only command; with it the folder can be a positional argument

    def __post_init__(self) -> None:
        check_choice("command", self.command, ("make",))
        for name in ("folder", "data", "source"):
            check_given(name, getattr(self, name))


EXPERIMENT = """# @package _global_
# make train, or: python -m pipeline train --config-dir conf experiment={name}
defaults:
  - override /data: {name}
  - override /model: {model}

name: {name}
{settings}tables:
  default:
    embedding_dim: 16
trainer:
  global_batch_size: {batch_size}  # {reason}
  evaluate_every_epochs: 1
"""
SEQUENCES = """# @package _global_
# make train, or: python -m pipeline train --config-dir conf experiment={name}
defaults:
  - user_sequences_sasrec
  - override /data: {name}

name: {name}
"""
SWEEP = """# Both learning rates: make sweep
defaults:
  - default
  - _self_

trials: 12
params:
  optimizer.sparse.lr: {low: 0.005, high: 0.2, log: true}
  optimizer.dense.lr: {low: 0.0003, high: 0.01, log: true}
"""
MODEL = '''"""A model of your own, to be changed: make train WORDS='plugins=[my_model] model=my_model'"""

from dataclasses import dataclass

import torch
from torch import nn

from pipeline.config.model import ModelConfig
from pipeline.config.registry import register
from pipeline.embeddings.collection import build_embeddings


@register("model", "my_model")
@dataclass
class MyModelConfig(ModelConfig):
    kind: str = "my_model"
    hidden: int = 64  # model.hidden=128 on the command line

    def build(self, tables, num_dense_features):
        width = num_dense_features + sum(table.embedding_dim * len(table.feature_names) for table in tables)
        names = [name for table in tables for name in table.feature_names]
        return MyModel(build_embeddings(tables), names, width, self.hidden)


class MyModel(nn.Module):
    def __init__(self, embeddings, names, width, hidden):
        super().__init__()
        self.embeddings, self.names = embeddings, names
        self.layers = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, dense_features, sparse_features):  # [batch, num_dense], KeyedJaggedTensor -> logits [batch, 1]
        pooled = self.embeddings(sparse_features)
        return self.layers(torch.cat([dense_features, *(pooled[name] for name in self.names)], dim=1))
'''
MAKEFILE = """# make prepare train; `make sweep`, `make export`, `make serve` then. WORDS adds overrides: make train WORDS='trainer.epochs=3'
# RUN is the run folder that train, report and export use: make train RUN=runs/wide. PREPARE_WORDS are for prepare.
PYTHON ?= python
SOURCE ?= {source}
CONF := --config-dir conf
WORDS ?=
PREPARE_WORDS ?=
RUN ?= $(or $(patsubst run_dir=%,%,$(filter run_dir=%,$(WORDS))),runs/{name}$(patsubst debug=%,_debug_%,$(filter debug=%,$(WORDS))))

.PHONY: prepare train report sweep export serve retrain schedule
prepare:
	$(PYTHON) -m pipeline prepare $(CONF) data={name} source=$(SOURCE) $(PREPARE_WORDS)
train:
	PYTHONPATH=.:$(PYTHONPATH) $(PYTHON) -m pipeline train $(CONF) experiment={name} run_dir=$(RUN) $(WORDS)
	$(PYTHON) -m pipeline evaluate run=$(RUN) split=test{importance}
report:
	$(PYTHON) -m pipeline report run=$(RUN)
sweep:
	$(PYTHON) -m pipeline sweep $(CONF) experiment={name} sweep=rates $(WORDS)
export:
	$(PYTHON) -m pipeline export run=$(RUN) output=artifacts/{name}
serve:
	$(PYTHON) -m pipeline serve artifact=artifacts/{name}
# On windows of new rows, a folder each (docs/do/retraining.md): make retrain WINDOWS=windows
WINDOWS ?= windows
AT = $(if $(findstring ://,$(WINDOWS))$(filter /%,$(WINDOWS)),$(WINDOWS),$(CURDIR)/$(WINDOWS))
WHEN ?= @hourly
retrain:
	$(PYTHON) -m pipeline retrain $(CONF) experiment={name} source=$(WINDOWS) $(WORDS)
# A crontab line that does it: (crontab -l; make -s schedule WHEN='*/30 * * * *') | crontab -   (Slurm, Kubernetes: python -m launch.schedule --help)
schedule:
	@$(PYTHON) -m launch.schedule cron --cron "$(WHEN)" --no-check-data -- --config-dir "$(CURDIR)/conf" experiment={name} 'source="$(AT)"' $(WORDS)
"""


def init(job: InitJob) -> str:
    """Create the project. Raises ConfigError if the folder is not empty, or `data` is not a data
    config."""
    folder, data = Path(job.folder), Path(job.data)
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: choose a new folder")
    if not data.is_file():
        raise ConfigError(
            f"data={data} is not a file: `python -m pipeline inspect {shell_words.word('source', job.source)}` writes one"
        )
    content = data.read_text()
    values = yaml.safe_load(content)
    if not isinstance(values, dict) or not {"name", "format"} <= values.keys():
        raise ConfigError(
            f"data={data} is not a data config: it needs name and format, as `python -m pipeline inspect` writes them"
        )
    name, source = str(values["name"]), os.path.abspath(job.source)
    files = {
        f"conf/data/{name}.yaml": content,
        f"conf/experiment/{name}.yaml": _experiment(name, values, source),
        "conf/sweep/rates.yaml": SWEEP,
        "my_model.py": MODEL,
        "Makefile": MAKEFILE.format(
            name=name,
            source=_for_make(shell_words.quoted(source)),
            importance="" if _is_sequences(values) else " importance_rows=4096",  # of a probability of a click
        ),
        ".gitignore": "datasets/\nruns/\nartifacts/\n__pycache__/\n",
    }
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    width = max(map(len, files))
    listed = [f"{folder}/{path:<{width}}  {len(text.splitlines())} lines" for path, text in files.items()]
    return "\n".join([*listed, f"next        cd {shlex.quote(str(folder))} && make prepare train"])


def _is_sequences(data: dict[str, Any]) -> bool:
    return bool(data["format"] == "user_sequences")


def _for_make(text: str) -> str:
    return text.replace("$", "$$").replace("#", "\\#")


def _experiment(name: str, data: dict[str, Any], source: str) -> str:
    """Return the text of the experiment, with a model and a batch size that suit the data."""
    if _is_sequences(data):
        return SEQUENCES.format(name=name)
    model, settings = choose_model(data)
    rows = estimate_rows(source, data)
    return EXPERIMENT.format(
        name=name,
        model=model,
        settings=yaml.safe_dump({"model": settings}, sort_keys=False) if settings else "",
        batch_size=choose_batch_size(rows),
        reason=f"about {rows:,.0f} rows" if rows else "the number of rows is unknown",
    )


def with_answers(argv: list[str], ask: Callable[[str, str], str]) -> list[str]:
    """Return the command line, with missing values from `ask` (question, default). A raw file
    without config is inspected. Raises UserError as inspect does, except for an unknown label,
    which is asked for."""
    words = read_arguments(argv, COMMANDS, "make")
    given = {
        key: value.strip("'\"") for key, _, value in (word.partition("=") for word in words.settings)
    } | words.values
    answers = dict(words.values)
    if "source" not in given:
        answers["source"] = ask("The raw rows: a CSV, TSV, Parquet or JSONL file", "")
    source = (given | answers)["source"]
    if "data" not in given:
        known = Path(f"{Path(source).name.partition('.')[0]}.yaml")
        default = str(known) if known.is_file() else ""
        answers["data"] = ask("The data config that reads it (empty: inspect the file, and write one)", default)
        answers["data"] = answers["data"] or _inspected(source, ask)
    if "folder" not in given:
        answers["folder"] = ask("The project's folder", Path((given | answers)["data"]).stem)
    settings = [*words.settings, *(f"{key}={quoted(value)}" for key, value in answers.items())]
    return [*settings, *(f"{name}={value}" if value else name for name, value in words.flags.items())]


def _inspected(source: str, ask: Callable[[str, str], str]) -> str:
    """Inspect the file and return the path of its data config."""
    from pipeline.cli.inspect import inspect
    from pipeline.data.inspect.profile import LabelError

    words, output = [f"source={quoted(source)}"], f"{Path(source).name.partition('.')[0]}.yaml"
    words.append(f"output={quoted(output)}")
    try:
        found = inspect(load_config(InspectJob, words))
    except LabelError as error:
        print(error, file=sys.stderr)
        found = inspect(load_config(InspectJob, [*words, f"label={quoted(ask('The column that is the label', ''))}"]))
    print(found.partition("\nnext ")[0], file=sys.stderr)
    return output


def _ask(question: str, default: str) -> str:
    from rich.console import Console
    from rich.prompt import Prompt

    return str(Prompt.ask(question, console=Console(stderr=True), default=default, show_default=bool(default))).strip()


COMMANDS = (Command("make", ("folder",)),)
_main = verb("init", InitJob, describe=str, commands=COMMANDS, default="make")(init)


def main() -> None:
    """Ask for missing values if the command runs on a terminal."""
    argv = sys.argv[1:]
    if sys.stdin.isatty() and sys.stderr.isatty() and not {"-h", "--help", "--cfg"} & set(argv):
        try:
            with print_user_errors():
                sys.argv[1:] = with_answers(argv, _ask)
        except (KeyboardInterrupt, EOFError):
            print("\nnothing was written", file=sys.stderr)
            sys.exit(INTERRUPTED)
    _main()
