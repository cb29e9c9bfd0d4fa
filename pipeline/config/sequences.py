"""Schema of the columns that hold sequences: data.columns.sequence (stdlib only)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from pipeline.runtime.errors import ConfigError, check_at_least, check_choice, did_you_mean

KEEPS = ("last", "first")
MAX_LENGTH = 10_000  # positions: a feature each to the lookup


@dataclass
class SequenceConfig:
    """A list whose order counts, oldest first: what a user did before this row.

    max_length: a longer one is cut in prepare and in serving; keep: its last ids, which are the newest, or its first.
    shares: the feature whose ids and whose table it shares; its values are counted with that feature's. beside: the
    sequence that it describes position by position, always as long as that, and cut as that is.
    """

    max_length: int | None = None
    keep: str | None = None
    shares: str | None = None
    beside: str | None = None

    def __post_init__(self) -> None:
        check_at_least("data.columns.sequence.<name>.max_length", self.max_length, 1, allow_none=True)
        if (self.max_length or 0) > MAX_LENGTH:
            raise ConfigError(
                f"data.columns.sequence.<name>.max_length={self.max_length} is more than {MAX_LENGTH} positions, each of "
                "which is looked up by itself; cut the sequence to what a model reads"
            )
        if self.keep is not None:
            check_choice("data.columns.sequence.<name>.keep", self.keep, KEEPS)


def resolve_sequences(sequences: Mapping[str, SequenceConfig], features: Iterable[str]) -> dict[str, SequenceConfig]:
    """With all lengths and sides; `features` are the columns of one value a row, whose ids sequences may share.

    Raises:
        ConfigError: a sequence without a length, or one that shares with, or stands beside, what it cannot.
    """
    known = list(features)
    found = {}
    for name, sequence in sequences.items():
        key = f"data.columns.sequence.{name}"
        if sequence.shares is not None and sequence.shares not in known:
            raise ConfigError(
                f"{key}.shares={sequence.shares!r} is no column of data.columns.sparse"
                f"{did_you_mean(sequence.shares, known)}; name the feature whose ids it has, or leave it out"
            )
        if sequence.beside is None:
            if sequence.max_length is None:
                raise ConfigError(f"{key} needs max_length=<ids>, or beside=<the sequence that it describes>")
            found[name] = replace(sequence, keep=sequence.keep or "last")
            continue
        leader = sequences.get(sequence.beside)
        if leader is None or leader.beside is not None or sequence.beside == name:
            leaders = [other for other, each in sequences.items() if each.beside is None]
            raise ConfigError(
                f"{key}.beside={sequence.beside!r} is no sequence of its own{did_you_mean(sequence.beside, leaders)}; "
                f"name one of {', '.join(leaders) or 'those with a max_length'}"
            )
        if (sequence.max_length, sequence.keep) != (None, None):
            raise ConfigError(f"{key} is cut as {sequence.beside} is: leave out its max_length and keep")
        found[name] = replace(sequence, max_length=leader.max_length, keep=leader.keep or "last")
    return found
