"""Parse a command line into a typed, checked job, before torch is imported.

conf/<verb>.yaml and its groups supply values, Hydra composes them, and a job dataclass types them.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_origin, get_type_hints

import yaml

from pipeline.cli import reference
from pipeline.cli.arguments import split_flags
from pipeline.cli.compose import (
    compose_job,
    config_folders,
    group_options,
    load_plugins_of,
    with_registered_models,
)
from pipeline.config.jobs.job import CONFIG_NAMES
from pipeline.config.jobs.train import TrainJob
from pipeline.config.saved_jobs import job_to_yaml
from pipeline.data.dataset import FILE_NAME
from pipeline.runtime.errors import ConfigError, UserError, did_you_mean
from pipeline.runtime.masking import find_secret, for_log, printable
from pipeline.runtime.process.exit_codes import USER_ERROR
from pipeline.runtime.process.failures import describe_os_error, write_error_file
from pipeline.runtime.process.stdout import write_out
from pipeline.runtime.storage import storage
from pipeline.training.preflight import check_geometry, check_world_sizes, validate_evaluation, validate_job

__all__ = [  # launch imports the checks from here, because it does not import training
    "check_geometry", "check_world_sizes", "has_dataset", "load_config", "parse_command_line", "print_user_errors",
    "validate_evaluation", "validate_train",
]  # fmt: skip

_NOT_UTF8 = (
    "is a name that this process cannot use: its file names are not in UTF-8. Set PYTHONUTF8=1, or "
    "LC_ALL=C.UTF-8, or choose a name in ASCII"
)
Job = TypeVar("Job")
Result = TypeVar("Result")


def parse_command_line(
    job_type: type[Job],
    doc: str | None,
    argv: Iterable[str] | None = None,
    validate: Callable[[Job], object] | None = None,
) -> Job:
    """Return the validated job of a command line (sys.argv). Exits for --help and --cfg, or on an
    error (exit code 2)."""
    with print_user_errors():
        overrides, flags = split_flags(sys.argv[1:] if argv is None else argv)
        config_dir = flags.get("--config-dir")
        if "--help" in flags:
            keys = [word for word in [flags["--help"], *overrides] if word and "=" not in word]
            load_plugins_of(word for word in overrides if "=" in word)
            explained = [explain_key(key, job_type) for key in keys]
            write_out("\n".join(explained or [help_text(job_type, doc or "", config_dir)]))
            sys.exit(0)
        job = load_config(job_type, overrides, config_dir)
        if "--cfg" in flags:
            write_out(job_to_yaml(job).removesuffix("\n"))
            sys.exit(0)
        if validate is not None:
            validate(job)
    return job


def validate_train(job: TrainJob) -> None:
    """Check a job against its data set and number of ranks, before torch is imported. Raises
    UserError."""
    validate_job(job, job.world_size)


def has_dataset(job: TrainJob) -> bool:
    """Return True if dataset.json can be read."""
    return storage.is_file(storage.join(job.data.path, FILE_NAME))


def print_line(text: str) -> None:
    """Print a line to stderr, only on rank 0, because all ranks have the same line."""
    if os.environ.get("RANK", "0") == "0":
        print(printable(text), file=sys.stderr, flush=True)


@contextmanager
def print_user_errors(written: str = "") -> Iterator[None]:
    """End the process with one line instead of a traceback for a UserError, and for fixable errors
    of the system.

    Fixable errors are a full disk, missing rights, or a missing path. `written` is the path that
    the verb writes to. Any other exception is a bug of this package or a library, and keeps its
    traceback.
    """
    try:
        yield
    except UserError as error:
        _end_with(str(error))
    except OSError as error:
        text = describe_os_error(error, written)
        if not text:
            raise
        _end_with(text)
    except UnicodeEncodeError as error:
        if sys.getfilesystemencoding().lower() == "utf-8":
            raise
        _end_with(f"{ascii(error.object)[:300]} {_NOT_UTF8}")


def check_encoding(words: Iterable[str]) -> None:
    """Raise ConfigError for a word that this process could not decode: no file can be written by such a name."""
    for word in words:
        if not word.isascii() and any("\udc80" <= character <= "\udcff" for character in word):
            raise ConfigError(f"{word!a} {_NOT_UTF8}")


def _end_with(text: str) -> NoReturn:
    message = f"error: {for_log(text)}"
    write_error_file(message)
    print_line(message)
    sys.exit(USER_ERROR)


def load_config(job_type: type[Job], argv: Iterable[str], config_dir: str | None = None) -> Job:
    """Return the job of overrides (and --config-dir). Raises as compose_job does."""
    overrides, flags = split_flags(argv)
    job = compose_job(job_type, overrides, flags.get("--config-dir", config_dir))
    if key := find_secret(dataclasses.asdict(job)):  # type: ignore[call-overload]
        raise ConfigError(
            f"{key} holds a credential, but a job is saved next to its results; set it in the environment, as the "
            "store's tools read it (for S3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY), or in its own config file"
        )
    return job


def explain_key(name: str, job_type: type) -> str:
    """Return type, default and meaning of a key, or of each key of a section. Raises ConfigError if
    there is none."""
    conf, verb = config_folders(), CONFIG_NAMES[job_type]
    found = reference.explain(name, job_type, verb, conf)
    if not found:
        names = [key.name for key in reference.keys_of(job_type, verb, conf)]
        ends = [key for key in names if key.endswith(f".{name}")]
        near = f"; did you mean {' or '.join(ends[:4])}?" if ends else did_you_mean(name, names)
        raise ConfigError(f"{verb} has no key {name!r}{near}")
    lines = [
        f"{key.name} = {key.default or '(no default)'}{f'   (model={key.model})' if key.model else ''}\n    {key.kind}: {key.meaning}"
        for key in found
    ]
    return "\n".join(lines)


def help_text(job_type: type, doc: str, config_dir: str | None = None) -> str:
    """Return the verb's docstring, its groups with their options, and the flags."""
    folders = config_folders(config_dir)
    config_name = CONFIG_NAMES[job_type]
    defaults = _defaults(folders, config_name)
    lines = []
    for group, options in with_registered_models(group_options(folders)).items():
        # without --config-dir there is nothing to choose
        if group in defaults and options != ["default"]:
            marked = [f"{option}*" if option == defaults[group] else option for option in options]
            lines.append(f"  {group + '=':14}{' '.join(marked)}")
    chosen = ["", "choose an option of a group (* is the default):", *lines] if lines else []
    lines = [doc.strip(), *chosen, "", "set any value by its key (all of them: --cfg):"]
    for field in dataclasses.fields(job_type):
        hint = get_type_hints(job_type)[field.name]
        if dataclasses.is_dataclass(hint):
            names = " ".join(inner.name for inner in dataclasses.fields(hint))
            lines.append(f"  {field.name + '.':14}{names}")
        else:
            lines.append(f"  {field.name}=" + ("<name>.<field>" if get_origin(hint) is dict else ""))
    lines += [
        "",
        "flags:",
        "  -h KEY              type, default and meaning of a key or a section (all: docs/reference/)",
        "  --cfg [job]         print the resulting job as YAML, and stop",
        "  --config-dir DIR    a conf folder whose options are added to the package's",
    ]
    return "\n".join(lines)


def _defaults(folders: list[Path], config_name: str) -> dict[str, Any]:
    """Return the defaults list of a verb's YAML, including the YAML files that it extends."""
    files = (folder / f"{config_name}.yaml" for folder in folders)
    file = next((file for file in files if file.is_file()), None)
    found: dict[str, Any] = {}
    if file is None:  # a plugin's verb
        return found
    for entry in yaml.safe_load(file.read_text()).get("defaults", []):
        if isinstance(entry, dict):
            found.update(entry)
        elif entry not in ("_self_", "job"):
            found.update(_defaults(folders, entry))
    return found
