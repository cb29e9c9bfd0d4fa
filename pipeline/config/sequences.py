"""Schema of the columns that hold sequences: data.columns.sequence (stdlib only)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from pipeline.runtime.errors import ConfigError, check_above, check_at_least, check_choice, check_within, did_you_mean

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


@dataclass
class HistoriesConfig:
    """A generated data set of users' histories, for `python -m pipeline generate`: a TSV with a header.

    A click goes by the dwell time of the last item of the history that has the target's category, and by the target itself.
    Lengths are drawn evenly from 0 to max_length. match_rate: of the targets, whose category is one of a history that has any.
    repeats: the share of positions with a category that the history had
    before; at 0 at most one item matches, and the order says nothing. `dwell_effect`, `item_effect`: standard deviations of
    both effects on the logit.
    """

    num_rows: int = 200_000
    num_items: int = 500
    num_categories: int = 30
    num_dwells: int = 8
    max_length: int = 20
    repeats: float = 0.0
    match_rate: float = 0.8
    dwell_effect: float = 2.0
    item_effect: float = 0.5
    positive_rate: float = 0.4
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_rows", "num_items", "num_categories", "num_dwells", "max_length"):
            check_at_least(f"histories.{name}", getattr(self, name), 1)
        for name in ("repeats", "match_rate"):
            check_within(f"histories.{name}", getattr(self, name), 0.0, 1.0)
        check_above("histories.dwell_effect", self.dwell_effect, 0.0)
        check_at_least("histories.item_effect", self.item_effect, 0.0)
        check_within("histories.positive_rate", self.positive_rate, 0.001, 0.999)
        if self.max_length >= self.num_categories or self.num_categories > self.num_items:
            raise ConfigError(
                f"histories.max_length={self.max_length} wants as many categories and one more, and each wants an item: "
                f"histories.num_categories={self.num_categories}, num_items={self.num_items}"
            )
