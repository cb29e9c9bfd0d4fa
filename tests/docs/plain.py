"""Count phrases of our old private dialect, which readers from elsewhere do not know:  python -m tests.docs.plain

The list is for prose: pages without their code blocks and code words, docstrings, comments. Each phrase has the plain words.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections import Counter
from pathlib import Path

from tests.docs.pages import PAGES, REPOSITORY, name_of

PHRASES = {
    r"what bec(?:omes?|ame) of": "the action on, the transform of, the status of",
    r"\b(?:go|goes|going|gone|went) on\b": "continue, resume, run",
    r"\bbesides?\b": "next to, compared with, in addition to, also",
    r"\bthose (?:that|which|of|who|with)\b": "repeat the noun",
    r"\bthat of\b": "repeat the noun",
    r"\bof (?:its|their) own\b": "its own, a separate",
    r"\bthe others\b": "the other ranks, the remaining rows",
    r"\bheld (?:to|against)\b": "compared with, checked against",
    r"\banew\b": "again",
    r"\b(?:is|are|was|were) no (?!longer|more than)": "is not a, there is no",
    r"\bbut for\b": "except for",
    r"\bwhole\b(?! numbers?| values?)": "complete, full, all",
    r", for (?:it|they|he|there|nobody|none|no|this|these|what|whoever|its|their|otherwise)\b": "because",
    r"\b(?:stands?|lies?|lay|lain|stood) (?:in|on|at|there|beside|below|above|under|behind|by|still|apart)\b": "is stored in, is in",
    r"\ball the same\b": "anyway",
    r"\bways? out\b": "suggestion, fix",
    r"\brooms?\b": "package, space, memory, capacity",
    r"\b(?:go|goes|went) by\b": "uses, follows",
    r"\bgives? way\b": "lower its priority, yield",
    r"\bmend(?:s|ed|ing)?\b": "fix",
    r"\bwho(?:ever)? wants?\b": "to ...",
    r"\bas it stands\b": "unchanged",
    r"\bthe (?:latter|former)\b": "repeat the noun",
    r"\bsay so\b|\bsays so\b": "report it",
    r'"""(?:Of|As|Whether|What|Those|Where|Which|Empty|With|None where)\b': "begin a docstring with a verb: Return ...",
    r"\b(?:None|empty|nothing|false|true|0|NaN|zeros?|else) where\b": "if",
    r"\bnobody\b": "no rank, no process, unknown",
    r"\bin (?:the|its|their) (?:place|stead) of\b": "instead of",
    r"\bhas (?:it|them)\b(?! as\b)": "repeat the noun",
    r"\bis told\b|\bare told\b|\btold (?:by|apart|to|of)\b": "get, receive, distinguish",
}
ALLOWED = {"there is no", "there are no", "there was no", "there were no"}
FOUND = {phrase: re.compile(phrase, re.IGNORECASE) for phrase in PHRASES}


def count(text: str) -> Counter[str]:
    """Return how often each phrase occurs."""
    text = re.sub(r"\s+", " ", text)
    text = re.sub(r"\bthere (?:is|are|was|were) no\b", "", text, flags=re.IGNORECASE)
    return Counter({phrase: len(hits) for phrase, found in FOUND.items() if (hits := found.findall(text))})


def prose(page: Path) -> str:
    """Return a page without its code blocks, comments and code words."""
    text = re.sub(r"(?ms)^```\w*$.*?^```$", "", page.read_text())
    text = re.sub(r"(?s)<!--.*?-->", "", text)
    return re.sub(r"`[^`\n]+`", "", re.sub(r"\]\([^)\s]+\)", "]", text))


def comments_and_docstrings(file: Path) -> str:
    """Return the comments of a module, and the strings that are a statement of their line."""
    found, previous = [], tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline):
        starts = previous in (tokenize.NEWLINE, tokenize.INDENT, tokenize.NL, tokenize.DEDENT, tokenize.ENCODING)
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and starts):
            found.append(re.sub(r"`[^`\n]+`", "", token.string))
        previous = token.type
    return "\n".join(found)


def pages() -> list[Path]:
    return [*PAGES, REPOSITORY / "CHANGELOG.md"]


def sources() -> list[Path]:
    return [file for folder in ("pipeline", "launch") for file in sorted((REPOSITORY / folder).rglob("*.py"))]


def per_thousand_lines() -> float:
    """Phrases in the comments and docstrings of the code, for each 1,000 lines of code."""
    files = sources()
    num_lines = sum(file.read_text().count("\n") for file in files)
    return 1000 * sum(count(comments_and_docstrings(file)).total() for file in files) / num_lines


if __name__ == "__main__":
    total: Counter[str] = Counter()
    for page in pages():
        found = count(prose(page))
        total += found
        if found:
            print(f"{found.total():>5}  {name_of(page)}  {dict(found.most_common(6))}")
    print(f"code: {per_thousand_lines():.2f} for each 1,000 lines")
    for phrase, number in total.most_common():
        print(f"{number:>5}  {phrase}: {PHRASES[phrase]}")
