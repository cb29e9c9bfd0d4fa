"""Parse columns of text as numbers or times, and find the rows whose text is neither."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.data.raw.value_types import plain, to_text

LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
TIMESTAMP_TYPES = (pa.int64(), pa.timestamp("us", "UTC"), pa.timestamp("us"))
NUMBER = r"^\s*([+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?(?i:inf|infinity)|(?i:nan))\s*$"
WHOLE = re.compile(r"\s*[+-]?\d+\s*", re.ASCII)
FRACTION = re.compile(r"\d{9,19}\.\d+", re.ASCII)  # seconds since 1970 as Python's time.time() gives them
# 2026-11-01 10:00:00.123456789 UTC, as BigQuery, Go and pandas write times
TOO_EXACT = re.compile(r"(\.\d{6})\d+")
MICROSECONDS = 1_000_000
LEAST_SECONDS = 1e8  # 1973: smaller fractions are no times


def parse_numbers(column: pa.ChunkedArray) -> tuple[pa.ChunkedArray, list[int]]:
    """Return text as float64, with null for text that is not a number, and the rows with such text."""
    try:
        return column.cast(pa.float64()), []
    except pa.ArrowInvalid:
        good = pc.match_substring_regex(column, NUMBER)
        found = np.flatnonzero(pc.fill_null(pc.invert(good), False).to_numpy()).tolist()
        return pc.ascii_trim_whitespace(pc.if_else(good, column, None)).cast(pa.float64()), found


def parse_timestamps(values: pa.Array) -> pa.Array:
    """Return whole numbers unchanged. Return dates and times as microseconds since 1970, in UTC if
    they have no zone. Fractions are seconds.
    """
    kind = values.type
    if pa.types.is_date(kind):
        values = values.cast(pa.timestamp("us"))
    if pa.types.is_timestamp(values.type):
        return values.cast(pa.timestamp("us", values.type.tz), safe=False).cast(pa.int64())
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return _of_fractions(values.cast(pa.float64()))
    if pa.types.is_string(kind) and pc.any(pc.starts_with(values, "0x")).as_py():
        raise pa.ArrowInvalid("hexadecimal digits are no time, although pyarrow reads them as whole numbers")
    for wanted in TIMESTAMP_TYPES:
        try:
            return values.cast(wanted).cast(pa.int64())
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            continue
    raise pa.ArrowInvalid(f"neither whole numbers nor ISO 8601 times: {values[:3]}")


def _of_fractions(values: pa.Array) -> pa.Array:
    """Return whole numbers unchanged. If any value is a fraction, return all as microseconds."""
    values = pc.if_else(pc.is_finite(values), values, None)
    if pc.all(pc.equal(pc.floor(values), values)).as_py() is not False:
        return values.cast(pa.int64())
    if pc.min(values).as_py() < LEAST_SECONDS:
        raise pa.ArrowInvalid("too small for seconds since 1970 with a fraction")
    return pc.round(pc.multiply(values, float(MICROSECONDS))).cast(pa.int64())


def parse_times(column: pa.ChunkedArray) -> tuple[pa.Array, list[int]]:
    """Return a column of times as int64, with null for values that are not times, and the rows with
    such values.

    Whole numbers and dates have different units, so a column may have either whole numbers or
    dates.
    """
    values = plain(column).combine_chunks()
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    try:
        return parse_timestamps(values), []
    except pa.ArrowInvalid:
        values = to_text(values)
    try:
        exact = pc.replace_substring_regex(values, rf"{TOO_EXACT.pattern}", r"\1")
        return parse_timestamps(pc.replace_substring_regex(exact, r" UTC$", "Z")), []
    except pa.ArrowInvalid:
        coded = values.dictionary_encode()
    texts: list[str] = coded.dictionary.to_pylist()
    times = [_time(text) for text in texts]
    is_whole = np.array([WHOLE.fullmatch(text) is not None for text in texts], bool)
    indices = coded.indices.fill_null(len(texts)).to_numpy()
    known = np.array([time is not None for time in times], bool)
    counts = np.bincount(indices, minlength=len(texts) + 1)[: len(texts)]
    mostly_whole = 2 * counts[known & is_whole].sum() > counts[known].sum()
    good = np.append(known & (is_whole == mostly_whole), False)
    of_texts = pa.array([time if fits else None for time, fits in zip(times, good, strict=False)], pa.int64())
    return of_texts.take(coded.indices), np.flatnonzero(~good[indices]).tolist()


def _time(text: str) -> int | None:
    if FRACTION.fullmatch(text.strip()):
        return round(float(text) * MICROSECONDS)
    if WHOLE.fullmatch(text):
        return int(text) if abs(int(text)) < 2**63 else None
    exact = TOO_EXACT.sub(r"\1", text.strip()).removesuffix(" UTC")
    try:
        return int(parse_timestamps(pa.array([exact]))[0].as_py())
    except (pa.ArrowInvalid, TypeError):
        pass
    try:
        time = datetime.fromisoformat(exact)
    except ValueError:
        return None
    aware = time if time.tzinfo is not None else time.replace(tzinfo=UTC)
    return round(aware.timestamp() * MICROSECONDS)
