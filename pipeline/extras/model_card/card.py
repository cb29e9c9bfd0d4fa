"""Define the content of a model card. These types are its schema: msgspec checks a file by them, and
`python -m pipeline card format=schema` prints them as JSON Schema.

None means that a value is not known. It is never replaced by a guess.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from pipeline.runtime.errors import DamagedError
from pipeline.runtime.json_values import finite

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Metric:
    """A measured number. low, high: its 95 % interval over rows. slice: such as city=Rome; None: all rows."""

    name: str
    split: str
    label: str | None
    slice: str | None
    rows: int
    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Label:
    """A label that the model predicts, and the kind of the label."""

    name: str | None
    kind: str


@dataclass(frozen=True)
class Source:
    """A file of raw rows."""

    name: str
    rows: int | None
    size_bytes: int | None
    sha256: str | None


@dataclass(frozen=True)
class SplitRows:
    """The rows of a split, and the share of positive labels among them."""

    rows: int
    label_rate: float | None


@dataclass(frozen=True)
class TrainingData:
    """The data set. window: the time of its training rows."""

    name: str | None
    sha256: str | None
    window: str | None
    sources: list[Source] | None
    splits: dict[str, SplitRows] | None
    quarantined_rows: int | None


@dataclass(frozen=True)
class Since:
    """What came after the export. newest_delta: of servers; 0: none. ne: of that delta."""

    version: str | None
    is_champion: bool | None
    window: str | None
    parent: str | None
    judged_on: str | None
    ne_when_judged: float | None
    newest_delta: int | None
    delta_step: int | None
    delta_ne: float | None


@dataclass(frozen=True)
class ModelCard:
    """The card. parity: split -> how the artifact differs from the trained model. since: None in the
    artifact's file, which states what was known at the export."""

    name: str | None
    artifact: str
    model: str | None
    labels: list[Label] | None
    license: str | None
    contact: str | None
    intended_use: str | None
    data: TrainingData
    tables: dict[str, int]
    num_rows: int
    size_bytes: int
    layers: str
    calibration: str
    metrics: list[Metric]
    parity: dict[str, dict[str, float | None]]
    limits: list[str]
    lineage: dict[str, str | int | float | bool | None]
    since: Since | None = None
    format_version: int = field(default=FORMAT_VERSION)

    def to_json(self) -> str:
        return json.dumps(finite(asdict(self)), indent=1, ensure_ascii=False) + "\n"


def read_card(text: str, path: str) -> ModelCard:
    """Return the card in `text`. Raises DamagedError unless the text follows the schema."""
    try:
        card = msgspec.json.decode(text, type=ModelCard)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise DamagedError(f"{path} is not a model card: {error}") from None
    if card.format_version != FORMAT_VERSION:
        raise DamagedError(
            f"{path} is a model card of format {card.format_version}, this release reads {FORMAT_VERSION}"
        )
    return card


def json_schema() -> dict[str, Any]:
    """Return the schema of card.json as JSON Schema."""
    return msgspec.json.schema(ModelCard)
