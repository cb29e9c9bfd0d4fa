"""Each command, key, path and link of the pages exists: what is renamed in the code is renamed there too."""

from __future__ import annotations

import ast
import functools
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import launch.chain  # noqa: F401  # it registers its target
from launch.targets import registered
from pipeline.cli.command_line import Arguments, load_config, read_arguments
from pipeline.runtime.errors import ConfigError
from tests.docs.keys import PLAIN, groups, is_override, jobs, verbs
from tests.docs.pages import (
    OTHER,
    PAGES,
    REPOSITORY,
    SHELL,
    Command,
    anchors_of,
    blocks_of,
    code_words,
    commands_in,
    commands_of,
    files_of,
    links_of,
    name_of,
    prose_of,
)

by_page = pytest.mark.parametrize("page", PAGES, ids=name_of)
# What the default suite composes: the page that a newcomer pastes from. `make campaigns` composes all of them.
FIRST_PAGES = ("docs/learn/tutorial.md",)
A_FILE = re.compile(
    r"\.(py|json|jsonl|md|yaml|yml|html|svg|pt2|onnx|arrow|parquet|csv|tsv|rows|kept|bin|log|gz|cfg|toml|css|db)$"
)


def all_commands(page: Path) -> Iterator[Command]:
    """Commands of the page's blocks, and those in its prose."""
    for block in blocks_of(page):
        yield from commands_of(block)
    for word in code_words(page):
        if re.match(r"(python -m|torchx run|torchrun|make) \S", word.replace("\\|", "|")):
            yield from commands_in(re.sub(r" \.\.\.(?=$| )", "", word.replace("\\|", "|")), name_of(page))


@by_page
def test_every_block_names_its_language_and_shell_blocks_say_whether_they_run(page: Path) -> None:
    for block in blocks_of(page):
        assert block.language in SHELL + OTHER, f"{block}: ```{block.language} is not one of {SHELL + OTHER}"
        if block.language in SHELL:
            assert block.mark, f"{block}: put <!-- run --> or <!-- not run: why --> on the line above"
        elif block.language != "python":  # whose docstrings may show a command
            hidden = re.search(r"(?m)^(\$ |python -m |torchx |make )", block.text)
            assert not hidden, f"{block}: a command in a block of {block.language}: {hidden and hidden[0]}"
    indented = re.search(r"(?m)^ {4}(\$ |python -m |torchx |make ).*", prose_of(page))
    assert not indented, f"{name_of(page)}: fence and mark this command: {indented and indented[0]}"


@by_page
def test_every_command_names_verbs_keys_and_options_that_there_are(page: Path) -> None:
    for command in all_commands(page):
        problem = problem_of(command)
        assert not problem, f"{command}\n{problem}"


# docs/reference/ is written from the keys (test_reference.py).
@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name not in ("keys", "verbs")], ids=name_of)
def test_every_key_in_the_prose_is_a_key_of_a_job(page: Path) -> None:
    first_words = {name for job in jobs() for name in job.__dataclass_fields__}
    for word in (part for words in code_words(page) for part in several(words)):
        match = re.fullmatch(r"([a-z_]+)((?:\.[\w<>*]+)*)(=.*)?", word)
        if not match or A_FILE.search(word.partition("=")[0]) or not (match[2] or match[3]):
            continue
        if match[1] in first_words:
            assert any(is_override(job, word, our_options()) for job in jobs()), f"{name_of(page)}: `{word}`"
        elif match[1] in groups() and not match[2] and (match[3] or "=")[1:].isidentifier():
            assert match[3][1:] in our_options()[match[1]], f"{name_of(page)}: `{word}` is not an option"


def several(words: str) -> list[str]:
    """`a=1 b=2` as two words, where each of them sets a key; else what was given."""
    parts = words.split()
    return parts if all(re.match(r"[a-z_.]+=", part) for part in parts) else [words]


@by_page
def test_every_path_module_and_link_is_there(page: Path) -> None:
    for word in code_words(page):
        path = re.match(r"((?:pipeline|launch|tests|benchmarks|docs|conf|examples|sharding_plans)/[\w./-]*)", word)
        is_ours = path and "<" not in word and not page.name.startswith("from_")  # those name other repositories' files
        assert not is_ours or (REPOSITORY / path[1]).exists(), f"{name_of(page)}: `{word}`"
        if re.fullmatch(r"(pipeline|launch)(\.\w+)+", word) and not word.endswith((".yaml", ".json")):
            assert is_module_or_member(word), f"{name_of(page)}: `{word}`"
    for target in links_of(page):
        file, _, anchor = target.partition("#")
        found = (page.parent / file).resolve() if file else page
        assert found.exists(), f"{name_of(page)} links to {target}"
        assert not anchor or anchor in anchors_of(found), f"{name_of(page)} links to {target}"


@by_page
def test_every_import_in_the_pages_is_there(page: Path) -> None:
    for block in blocks_of(page):
        if block.language == "python":
            for node in ast.walk(ast.parse(block.text)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("pipeline", "launch"):
                    for alias in node.names:
                        assert is_module_or_member(f"{node.module}.{alias.name}"), (
                            f"{block}: {node.module}.{alias.name}"
                        )


@pytest.mark.parametrize("page", FIRST_PAGES)
def test_commands_of_the_first_pages_compose(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert assert_all_compose(REPOSITORY / page, tmp_path, monkeypatch) >= 5


@pytest.mark.campaign
@pytest.mark.parametrize("page", [page for page in PAGES if name_of(page) not in FIRST_PAGES], ids=name_of)
def test_all_commands_compose(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_all_compose(page, tmp_path, monkeypatch)


def test_decisions_are_numbered_one_by_one_and_named_by_a_number_that_there_is() -> None:
    files = sorted(path.name for path in (REPOSITORY / "docs" / "adr").glob("[0-9]*.md"))
    numbers = [int(name[:4]) for name in files]
    assert numbers == list(range(1, len(files) + 1)), "two branches took one number: the later page takes the next"
    for name in files:
        first = (REPOSITORY / "docs" / "adr" / name).read_text().splitlines()[0]
        assert first.startswith(f"# {int(name[:4])}. "), f"{name} begins with {first!r}"
    for page in [*PAGES, REPOSITORY / "CHANGELOG.md"]:
        named = {int(number) for number in re.findall(r"\bADR (\d+)", page.read_text())}
        assert named <= set(numbers), f"{name_of(page)} names ADR {sorted(named - set(numbers))}"


def test_every_page_is_in_an_index() -> None:
    """The index of docs/, or the index of the folder where the page is."""
    docs = REPOSITORY / "docs"
    indexes = [docs / "README.md", *docs.glob("*/README.md")]
    linked = {(index.parent / link.partition("#")[0]).resolve() for index in indexes for link in links_of(index)}
    pages = {page for page in PAGES if docs in page.parents} - {docs / "README.md"}
    examples = {path for path in (REPOSITORY / "examples").iterdir() if path.suffix in (".py", ".yaml")}
    assert sorted(name_of(path) for path in (pages | examples) - linked) == []


def assert_all_compose(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Compose each command of a page to its job, in a folder with the config files that the pages write."""
    write_files(folder)
    monkeypatch.chdir(folder)
    composed: set[tuple[str, ...]] = set()
    for command in all_commands(page):
        found = verb_of(command)
        if found is None or found[0] in PLAIN or "..." in shlex.join(command.words):
            continue
        verb, words = verbs()[found[0]], read(*found)
        if any(command.name == words.command and command.run is not None for command in verb.commands):
            continue  # plan show FILE has no job
        if not words.settings and not words.values:
            continue  # the prose names a verb
        overrides = words.overrides() if "command" in verb.job.__dataclass_fields__ else words.remaining()
        if (found[0], *overrides) not in composed:
            try:
                load_config(verb.job, overrides)
            except ConfigError as error:
                pytest.fail(f"{command}\n{error}")
        composed.add((found[0], *overrides))
    return len(composed)


def read(verb: str, words: list[str]) -> Arguments:
    return read_arguments([word for word in words if word != "..."], verbs()[verb].commands, verbs()[verb].default)


def write_files(folder: Path) -> None:
    for page in PAGES:
        for block in blocks_of(page):
            for path, text in files_of(block).items():
                file = folder / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)


@functools.cache
def our_options() -> dict[str, list[str]]:
    """Options of the groups, with those that the pages' own config files add."""
    added: dict[str, list[str]] = {group: list(options) for group, options in groups().items()}
    for page in PAGES:
        for block in blocks_of(page):
            for path in files_of(block):
                if match := re.search(r"(\w+)/(\w+)\.yaml$", path):
                    added.setdefault(match[1], []).append(match[2])
    return added


def verb_of(command: Command) -> tuple[str, list[str]] | None:
    """The verb that a command runs, and the words that it is given; None for what runs none."""
    words = list(command.words)
    if "-m" in words and words[0].endswith(("python", "torchrun", "python3")):
        modules = [words[index + 1] for index, word in enumerate(words[:-1]) if word == "-m"]
        module, rest = modules[-1], words[words.index(modules[-1]) + 1 :]
        if module == "pipeline" and rest and not rest[0].startswith("-"):
            return rest[0], rest[1:]
        if module == "pipeline.extras.shadow":  # it runs the verb that follows
            return None if rest[:1] == ["--patches"] else (rest[0], rest[1:])
        if module == "launch.render" and rest[:1] == ["chain"]:
            return None
        if module in ("launch.render", "launch.schedule"):
            if "--help" in rest:
                return None
            verb = rest[1] if module == "launch.render" and len(rest) > 1 else "retrain"
            return verb, rest[rest.index("--") + 1 :] if "--" in rest else []
    if words[0].endswith("torchx") and "run" in words:
        named = next((word for word in words if re.fullmatch(r"pipeline\.\w+", word)), None)
        if named:
            return named.removeprefix("pipeline."), words[words.index("--") + 1 :] if "--" in words else []
    return None


def problem_of(command: Command) -> str:
    words = command.words
    if words[0] == "make":
        targets = re.findall(r"(?m)^([\w-]+):", (REPOSITORY / "Makefile").read_text())
        unknown = [word for word in words[1:] if "=" not in word and word not in targets]
        return f"make has no {unknown}" if unknown else ""
    module = words[2] if len(words) > 2 and words[1] == "-m" else ""
    if module == "launch.render" and list(words[3:4]) == ["chain"]:
        targets = set("".join(words[4:5]).split("|"))
        unknown_targets = targets - {*registered("chain"), "TARGET"}
        return f"launch.render chain knows no {unknown_targets}" if unknown_targets else ""
    if module.startswith(("benchmarks.", "tests.")):
        file = REPOSITORY / (module.replace(".", "/") + ".py")
        if not file.exists():
            return f"there is no {module}"
        flags = [word.partition("=")[0] for word in words[3:] if word.startswith("--")]
        missing = [flag for flag in flags if f'"{flag}"' not in file.read_text()]
        return f"{module} has no {missing}" if missing else ""
    if words[0] in ("python", ".venv/bin/python") and len(words) > 1 and words[1].endswith(".py"):
        return "" if (REPOSITORY / words[1]).exists() else f"there is no {words[1]}"
    found = verb_of(command)
    if found is None or found[0] in PLAIN:
        return ""
    if found[0] not in verbs():
        return f"there is no verb {found[0]!r}; there are {', '.join(verbs())}"
    try:
        words = read(*found)
    except ConfigError as error:
        return str(error)
    if words.settings and not words.command and any("=" not in word for word in words.settings):
        return f"{found[0]} takes no {[word for word in words.settings if '=' not in word]}"
    job = verbs()[found[0]].job
    if any(word.startswith("plugins=") for word in words.settings):  # a plugin brings options and keys of its own
        words = replace(words, settings=[word for word in words.settings if not word.startswith("model")])
    return "; ".join(
        f"no key or option {word!r}" for word in words.settings if not is_override(job, word, our_options())
    )


@functools.cache
def is_module_or_member(name: str) -> bool:
    """A package, a module, or what a module defines at its top."""
    path = REPOSITORY / name.replace(".", "/")
    if path.is_dir() or path.with_suffix(".py").exists():
        return True
    module, _, member = name.rpartition(".")
    file = (REPOSITORY / module.replace(".", "/")).with_suffix(".py")
    return file.exists() and bool(re.search(rf"(?m)^(def|class) {member}\b|^{member}\b", file.read_text()))
