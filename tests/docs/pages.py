"""Read the pages: their fenced blocks, the shell commands in them, the code words of their prose, and their links.

A block of shell commands is marked by an HTML comment on the line above its fence:

    <!-- run -->                 CPU, minutes at most: the campaign runs it, in the page's order, in one folder
    <!-- not run: why -->        it is composed and checked, not run
    <!-- not run: a mistake on purpose -->                          it shows an error of the command line: not checked either
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [REPOSITORY / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "sharding_plans/README.md")]
    + [path for path in (REPOSITORY / "docs").rglob("*.md") if path.parent.name != "adr"]
)
SHELL = ("bash", "console")  # commands; commands after `$ ` with what they print
OTHER = ("text", "python", "pycon", "yaml", "json", "toml", "protobuf", "svg")
OPERATORS = set("|&;<>")
MARK = re.compile(r"^<!-- (run|not run: .+?) -->$")
MISTAKE = "not run: a mistake on purpose"
FENCE = re.compile(r"^```(\w*)$")
HEREDOC = re.compile(r"<<\s*'?(\w+)'?\s*$")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page; `mark` is what stands in the comment above it."""

    page: str
    line: int
    language: str
    mark: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """One simple command: its words, without redirections."""

    where: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.where}: {shlex.join(self.words)}"


def name_of(page: Path) -> str:
    return page.relative_to(REPOSITORY).as_posix()


def blocks_of(page: Path) -> list[Block]:
    found: list[Block] = []
    lines = page.read_text().splitlines()
    start = 0
    for number, line in enumerate(lines):
        fence = FENCE.match(line)
        if fence and not start:
            start = number + 1
            mark = MARK.match(lines[number - 1]) if number else None
            found.append(Block(name_of(page), start, fence[1], mark[1] if mark else "", ""))
        elif line == "```" and start:
            text = "\n".join(lines[start:number]) + "\n"
            found[-1] = Block(**{**vars(found[-1]), "text": text})
            start = 0
    assert not start, f"{name_of(page)}:{start}: this fence is not closed"
    return found


def prose_of(page: Path) -> str:
    """The page without its blocks and comments."""
    text = re.sub(r"(?ms)^```\w*$.*?^```$", "", page.read_text())
    return re.sub(r"(?s)<!--.*?-->", "", text)


def code_words(page: Path) -> list[str]:
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose_of(page))


def links_of(page: Path) -> list[str]:
    """Targets of links and pictures that are not on the web."""
    text = re.sub(r"`[^`\n]*`", "", prose_of(page))
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]


def anchors_of(page: Path) -> set[str]:
    """What GitHub calls the page's headings."""
    heads = re.findall(r"(?m)^#+ (.+)$", re.sub(r"(?ms)^```\w*$.*?^```$", "", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def script_of(block: Block) -> str:
    """What a shell is given to run: the block, or of a console the lines after `$ `."""
    if block.language == "bash":
        return block.text
    lines, continued = [], False
    for line in block.text.splitlines():
        if line.startswith("$ ") or continued:
            lines.append(line.removeprefix("$ "))
            continued = line.endswith("\\")
    return "\n".join(lines) + "\n"


def files_of(block: Block) -> dict[str, str]:
    """Files that `cat > PATH <<EOF` writes."""
    pattern = r"(?ms)^cat > (\S+) <<\s*'?(\w+)'?\n(.*?)^\2$"
    return {path: text for path, _, text in re.findall(pattern, script_of(block))}


def commands_of(block: Block) -> Iterator[Command]:
    if block.language in SHELL and block.mark != MISTAKE:
        yield from commands_in(script_of(block), str(block))


def commands_in(script: str, where: str) -> Iterator[Command]:
    """Simple commands of a shell script: lists, pipes and loops are taken apart, variables replaced by what they were set to."""
    variables: dict[str, str] = {}
    for line in _logical_lines(script):
        line = re.sub(r"\$\{?(\w+)\}?", lambda match: variables.get(match[1], "1"), line)
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        words: list[str] = []
        skip = False
        for word in [*lexer, ";"]:
            if skip:  # what a redirection names
                skip = False
            elif set(word) <= OPERATORS:
                if "<" in word or ">" in word:
                    skip = True
                    if words and words[-1].isdigit():
                        words.pop()
                    continue
                words = _without_keywords(words)
                while words and re.match(r"^[A-Za-z_]+=", words[0]):
                    key, _, value = words.pop(0).partition("=")
                    variables[key] = value
                if words:
                    yield Command(where, tuple(words))
                words = []
            else:
                words.append(word)


def _logical_lines(script: str) -> Iterator[str]:
    """Lines with continuations joined, without comments and the bodies of here-documents."""
    end, joined = "", ""
    for line in script.splitlines():
        if end:
            end = "" if line == end else end
            continue
        joined += line
        if joined.endswith("\\"):
            joined = joined[:-1] + " "
            continue
        if heredoc := HEREDOC.search(joined):
            end, joined = heredoc[1], joined[: heredoc.start()]
        if joined.count('"') % 2 or joined.count("'") % 2:  # a quoted text goes on in the next line
            joined += "\n"
            continue
        yield joined
        joined = ""
    assert not joined, f"a quote is not closed: {joined}"


def _without_keywords(words: list[str]) -> list[str]:
    while words and words[0] in ("do", "then", "if", "while", "until", "!", "time", "exec"):
        words = words[1:]
    return [] if words and words[0] in ("for", "done", "fi", "trap", "export") else words
