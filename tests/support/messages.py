"""Patterns for the messages of errors: the names and numbers that a message must hold, and none of its sentences."""

from __future__ import annotations

import re


def names(words: str) -> str:
    """A pattern for `pytest.raises(match=...)` that finds each word of `words` somewhere in the message, in any order."""
    return r"(?s)\A" + "".join(f"(?=.*{re.escape(word)})" for word in words.split())


def mentions(text: object, words: str) -> bool:
    """Whether each word of `words` is somewhere in `text`, in any order."""
    return all(word in str(text) for word in words.split())
