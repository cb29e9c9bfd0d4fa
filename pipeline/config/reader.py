"""Define how shards become batches, and check batch sizes against ranks (stdlib only)."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.runtime.errors import ConfigError, check_at_least, check_choice, check_within

SHUFFLES = ("row_groups", "none")
BAD_ROW_POLICIES = ("stop", "quarantine")
VERIFICATIONS = ("size", "checksum")


@dataclass
class ReaderConfig:
    """How shards become batches. `num_streams` fixes the order of rows for every world size that
    divides it.

    shuffle: row_groups permutes row groups and the rows within each, differently in every epoch;
    none follows the file order in rounds of `num_streams` row groups. decode_threads: 1 decodes on
    the prefetch thread; more read one row group ahead for every stream and hide the latency of
    storage. keep_mib: a split whose decoded columns fit this size stays in each rank's memory; 0
    keeps none. on_bad_rows: stop names the first bad row and ends the run on all ranks. quarantine
    gives bad rows weight 0, so steps and batches do not change, and lists them in <run>/quarantine,
    up to max_bad_fraction. verify: check the size of every shard at the start, or also its SHA-256
    (ranks share the work).
    """

    num_streams: int = 16
    shuffle: str = "row_groups"
    prefetch_batches: int = 8
    decode_threads: int = 1
    keep_mib: int = 128
    on_bad_rows: str = "stop"
    max_bad_fraction: float = 0.001
    verify: str = "size"

    def __post_init__(self) -> None:
        check_choice("reader.shuffle", self.shuffle, SHUFFLES)
        check_choice("reader.on_bad_rows", self.on_bad_rows, BAD_ROW_POLICIES)
        check_within("reader.max_bad_fraction", self.max_bad_fraction, 0.0, 1.0)
        check_choice("reader.verify", self.verify, VERIFICATIONS)
        check_at_least("reader.num_streams", self.num_streams, 1)
        check_at_least("reader.prefetch_batches", self.prefetch_batches, 1)
        check_at_least("reader.decode_threads", self.decode_threads, 1)
        check_at_least("reader.keep_mib", self.keep_mib, 0)


def check_batch_geometry(global_batch_size: int, num_streams: int, world_size: int) -> None:
    """Raise ConfigError unless all ranks have equally many streams and each stream has equally many
    rows per batch."""
    if num_streams % world_size:
        ranks = [n for n in range(1, num_streams + 1) if num_streams % n == 0]
        raise ConfigError(
            f"data.reader.num_streams={num_streams} cannot be divided evenly among {world_size} ranks: run on "
            f"{_either(ranks)} ranks, or set data.reader.num_streams={_either(_multiples_near(num_streams, world_size))} "
            "(another number of streams changes the order of rows)"
        )
    if global_batch_size % num_streams:
        streams = [n for n in range(world_size, global_batch_size + 1, world_size) if global_batch_size % n == 0]
        nearest = min(streams, key=lambda n: (abs(n - num_streams), n), default=None)
        raise ConfigError(
            f"a global batch of {global_batch_size} rows cannot be divided evenly among data.reader.num_streams={num_streams}: "
            f"use a global batch size of {_either(_multiples_near(global_batch_size, num_streams))}"
            + (f", or data.reader.num_streams={nearest}" if nearest else "")
        )


def _multiples_near(value: int, factor: int) -> list[int]:
    below = value // factor * factor
    return [n for n in (below, below + factor) if n]


def _either(choices: list[int]) -> str:
    *others, last = [str(choice) for choice in choices]
    return f"{', '.join(others)} or {last}" if others else last
