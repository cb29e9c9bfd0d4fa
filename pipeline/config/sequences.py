"""Define columns that hold sequences: data.columns.sequence (stdlib only)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from pipeline.runtime.errors import ConfigError, check_at_least, check_choice, did_you_mean

KEEPS = ("last", "first")
MAX_LENGTH = 10_000  # positions; the lookup treats each position as a feature


@dataclass
class SequenceConfig:
    """A list whose order counts, oldest first: for example the earlier actions of a user.

    max_length: `prepare` and serving cut longer lists. keep: whether the last (newest) or the first
    ids stay. shares: the feature whose ids and table it shares; values of both are counted
    together. beside: the sequence that this one describes position by position; both have the same
    length and are cut equally.
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
                "which needs its own lookup; cut the sequence to what a model reads"
            )
        if self.keep is not None:
            check_choice("data.columns.sequence.<name>.keep", self.keep, KEEPS)


def resolve_sequences(sequences: Mapping[str, SequenceConfig], features: Iterable[str]) -> dict[str, SequenceConfig]:
    """Fill in default lengths and sides. `features` are the columns with one value per row, whose
    ids may be shared.

    Raises:
        ConfigError: a sequence has no length, or its `shares` or `beside` names a wrong column.
    """
    known = list(features)
    found = {}
    for name, sequence in sequences.items():
        key = f"data.columns.sequence.{name}"
        if sequence.shares is not None and sequence.shares not in known:
            raise ConfigError(
                f"{key}.shares={sequence.shares!r} is not a column of data.columns.sparse"
                f"{did_you_mean(sequence.shares, known)}; name the feature whose ids it shares, or leave it out"
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
                f"{key}.beside={sequence.beside!r} is not a sequence with its own length{did_you_mean(sequence.beside, leaders)}; "
                f"name one of {', '.join(leaders) or 'those with a max_length'}"
            )
        if (sequence.max_length, sequence.keep) != (None, None):
            raise ConfigError(f"{key} is cut like {sequence.beside}: leave out its max_length and keep")
        found[name] = replace(sequence, max_length=leader.max_length, keep=leader.keep or "last")
    return found
