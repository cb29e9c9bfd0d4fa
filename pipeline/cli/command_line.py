"""Parse a command line into a typed, checked job, before torch is imported.

    python -m pipeline checkpoints show runs/quickstart 300        is   command=show run=runs/quickstart step=300
    python -m pipeline registry rollback registry/q v000012        is   command=rollback registry=registry/q version=v000012

Flags, key=value settings and words without `key=` may be in any order. conf/<verb>.yaml and its groups supply values,
Hydra composes them, and a job dataclass types them.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_origin, get_type_hints

import yaml

from pipeline.cli.compose import (
    compose_job,
    config_folders,
    group_options,
    load_plugins_of,
    own_key,
    with_registered_models,
)
from pipeline.config.jobs.job import CONFIG_NAMES
from pipeline.config.jobs.train import TrainJob
from pipeline.config.saved_jobs import job_to_yaml
from pipeline.data.dataset import FILE_NAME, load_dataset
from pipeline.data.prepare.identity import check_not_contradicted
from pipeline.runtime.errors import ConfigError, UserError, did_you_mean
from pipeline.runtime.masking import find_secret, for_log, printable
from pipeline.runtime.process.exit_codes import USER_ERROR
from pipeline.runtime.process.failures import describe_os_error, write_error_file
from pipeline.runtime.process.stdout import write_out
from pipeline.runtime.storage import storage
from pipeline.training.preflight import check_geometry, check_world_sizes, validate_evaluation, validate_job

FLAGS = ("--help", "--cfg", "--config-dir")
HINTS = {"-m": "; `python -m pipeline sweep` tries several values"}  # of Hydra
HINTS["--multirun"] = HINTS["-m"]
KEY = re.compile(r"[\w*<>]+(\.[\w*<>]+)+")  # -h optimizer.dense.lr


@dataclass(frozen=True)
class Command:
    """A command of a verb. `words` are the keys that its positional words set, in order.

    patterns: key -> pattern of a word that sets this key. Such a word may be anywhere, if another
    word or setting gives the first key. run: does the command without a job; its words are then
    required. many: a key that takes all further words, as a list.
    """

    name: str
    words: tuple[str, ...] = ()
    patterns: Mapping[str, str] = field(default_factory=dict)
    run: Callable[[Arguments], None] | None = None
    many: str = ""

    def usage(self) -> str:
        return " ".join([self.name, *map(str.upper, self.words), *([f"{self.many.upper()}..."] if self.many else [])])


@dataclass(frozen=True)
class Arguments:
    """A command line that was read. `command` is "" for a verb without commands. values: keys that
    words set. settings: the key=value words."""

    command: str
    values: dict[str, str]
    settings: list[str]
    flags: dict[str, str]
    lists: dict[str, list[str]] = field(default_factory=dict)

    def overrides(self) -> list[str]:
        """Return everything as key=value words and flags, for a job with a field `command` and
        fields for the words' keys."""
        return [
            *([f"command={self.command}"] if self.command else []),
            *(f"{key}={quoted(value)}" for key, value in self.values.items()),
            *(f"{key}=[{','.join(map(quoted, values))}]" for key, values in self.lists.items()),
            *self.remaining(),
        ]

    def remaining(self) -> list[str]:
        """Return settings and flags: the command line without its command and words."""
        return [*self.settings, *(f"{name}={value}" if value else name for name, value in self.flags.items())]


def split_flags(argv: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """Separate --help, --cfg and --config-dir from a command line. Return the other words, and flag
    -> value."""
    words: list[str] = []
    flags: dict[str, str] = {}
    waiting = deque(argv)
    while waiting:
        word = waiting.popleft()
        name, equals, value = word.partition("=")
        name = "--help" if name == "-h" else name
        if not name.startswith("-"):
            words.append(word)
            continue
        if name not in FLAGS:
            hint = HINTS.get(name) or did_you_mean(name, FLAGS)
            hint = f"; overrides take no dashes: {word.lstrip('-')}" if equals else hint
            raise ConfigError(f"unknown flag {name} (there are {', '.join(FLAGS)}){hint}")
        following = waiting[0] if waiting and not equals else ""
        if name == "--config-dir" or (name == "--help" and KEY.fullmatch(following)):
            value = waiting.popleft() if following else value
        elif name == "--cfg" and following == "hydra":
            raise ConfigError("--cfg hydra: a job has no Hydra configuration; --cfg prints the job")
        elif name == "--cfg" and following in ("job", "all"):  # as users of Hydra type it
            waiting.popleft()
        flags[name] = value
    return words, flags


def read_arguments(argv: Iterable[str], commands: Sequence[Command], default: str = "") -> Arguments:
    """Split a command line into command, words, settings and flags. Raises ConfigError if an
    unknown flag or command, one word too many, or a required word is missing."""
    overrides, flags = split_flags(argv)
    if not commands:
        return Arguments("", {}, overrides, flags)
    words = [word for word in overrides if "=" not in word.split("/")[0] and not word.startswith("~")]
    settings = [word for word in overrides if word not in words]
    known = {command.name: command for command in commands}
    command = known[next((word for word in words if word in known), default)]
    if command.name in words:
        words.remove(command.name)
    given = {setting.partition("=")[0] for setting in settings}
    free = [key for key in command.words if key not in given]
    values: dict[str, str] = {}
    for key, pattern in command.patterns.items():
        fits = [word for word in words if re.fullmatch(pattern, word)]
        if fits and (len(words) > 1 or command.words[0] not in free):
            words.remove(fits[-1])
            values[key] = fits[-1]
    free = [key for key in free if key not in command.patterns]
    values = {**dict(zip(free, words, strict=False)), **values}
    rest = words[len(free) :]
    if rest and (not command.many or command.many in given):
        raise _unknown(words, command, known)
    if command.run is not None and len(values) < len(command.words) and "--help" not in flags:
        missing = " ".join(map(str.upper, command.words))
        raise ConfigError(f"{command.name} needs {missing}: {command.usage()}")
    return Arguments(command.name, values, settings, flags, {command.many: rest} if rest else {})


def _unknown(words: list[str], command: Command, known: Mapping[str, Command]) -> ConfigError:
    near = next((word for word in words if did_you_mean(word, known)), None)
    if near is None and command.words:
        return ConfigError(f"cannot read {words[-1]!r}: {command.usage()}")
    usages = "; ".join(command.usage() for command in known.values())
    word = near or words[-1]
    return ConfigError(f"cannot read {word!r}; commands are {usages}{did_you_mean(word, known)}")


def quoted(value: str) -> str:
    """Quote text so that Hydra reads it as text. Without quotes it reads numbers, and some signs in
    paths, differently."""
    is_plain = re.fullmatch(r"[\w./-]+", value) and not re.fullmatch(r"[\d._e+-]+", value)
    return value if is_plain else "'" + value.replace("'", "\\'") + "'"


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
        if isinstance(job, TrainJob) and has_dataset(job):
            given = [word.partition("=")[0].lstrip("+~") for word in overrides]
            if unused := check_not_contradicted(job.data, load_dataset(job.data.path), given):
                print_line(f"data         {unused}")
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
    from pipeline.cli import reference

    conf, verb = config_folders(), CONFIG_NAMES[job_type]
    found = reference.explain(own_key(name, job_type), job_type, verb, conf)
    if not found:
        keys = reference.keys_of(job_type, verb, conf)
        names, words = [key.name for key in keys], name.replace("_", " ").lower()
        ends = [key for key in names if key.endswith(f".{name}")]
        ends = ends or [key.name for key in keys if words in key.meaning.lower()]  # -h learning_rate
        shortest = sorted(dict.fromkeys(ends), key=len)[:4]
        near = f"; did you mean {' or '.join(shortest)}?" if ends else did_you_mean(name, names)
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
    for each in dataclasses.fields(job_type):
        hint = get_type_hints(job_type)[each.name]
        if dataclasses.is_dataclass(hint):
            names = " ".join(inner.name for inner in dataclasses.fields(hint))
            lines.append(f"  {each.name + '.':14}{names}")
        else:
            lines.append(f"  {each.name}=" + ("<name>.<field>" if get_origin(hint) is dict else ""))
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
