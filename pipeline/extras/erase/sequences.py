"""Erase a value from raw rows of data.format=user_sequences: each line is a user and the user's items, without a header.

In these lines a value is a word: a short number counts, and an item is no user of the same number.
"""

from __future__ import annotations

import os

from pipeline.data.dataset import Dataset
from pipeline.extras.erase.target import Target
from pipeline.extras.user_sequences.format import UserSequences
from pipeline.runtime.errors import DataError

FORMAT, USER, ITEM = "user_sequences", "user_id", "item_id"


def sequence_files(dataset: Dataset) -> set[str]:
    """Return the names of the files of sequences that a data set was prepared from."""
    return {each["path"] for each in dataset.sources} if dataset.recipe.get("format") == FORMAT else set()


def is_sequences(target: Target, path: str) -> bool:
    if target.feature not in (USER, ITEM):
        return False
    try:
        return os.path.basename(path) in target.sequence_files or UserSequences().propose(path) is not None
    except DataError:
        return False


def without(target: Target, line: bytes) -> bytes:
    """Return a line without the item, or nothing if it is a line of the user, or has no other item."""
    user, *items = line.split() or [b""]
    value = target.value.encode()
    if target.feature == USER:
        return b"" if user == value else line
    left = [each for each in items if each != value]
    if len(left) == len(items):
        return line
    return b" ".join([user, *left]) + b"\n" if left else b""
