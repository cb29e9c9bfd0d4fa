"""Read requests to /retrieve, and write responses.

{"rows": [{"<column>": value, ...}, ...], "k": 100, "allowed": ["item", ...], "excluded": ["item",
...]}: rows of users. The lists apply to all rows of the request. Unknown items in them are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
from starlette.responses import Response

from pipeline.config.columns import ColumnsConfig
from pipeline.config.serving import LimitsConfig
from pipeline.extras.retrieval.queries import Found, Queries, Wish
from pipeline.serving.http.batching import Scores
from pipeline.serving.http.request_rows import JSON_TYPE, USUAL_K, BadRequest, RequestReader
from pipeline.serving.scoring.scorer import FeatureTables

if TYPE_CHECKING:
    from pipeline.extras.retrieval.retriever import Retriever


class RetrieveReader(RequestReader):
    """Read the user columns of one artifact. Safe for several threads."""

    def __init__(self, columns: ColumnsConfig, limits: LimitsConfig, tables: FeatureTables | None = None) -> None:
        ids = Annotated[list[str | int], msgspec.Meta(max_length=limits.filter_ids)]
        k = Annotated[int, msgspec.Meta(ge=1, le=limits.k)]
        more = [("k", k, min(USUAL_K, limits.k)), ("allowed", ids | None, None), ("excluded", ids | None, None)]
        super().__init__(columns, limits, more, tables)

    def read(self, body: bytes, content_type: str) -> Queries:
        """Read a request. Raises BadRequest."""
        if content_type != JSON_TYPE:
            found = f"Content-Type {content_type!r}" if content_type else "a body without a Content-Type"
            raise BadRequest(415, f"{found} is not supported: send {JSON_TYPE}")
        asked = self.decode(body)
        rows = self.lists_of(asked.rows)
        wish = Wish(asked.k, None if asked.allowed is None else _texts(asked.allowed), _texts(asked.excluded or ()))
        return Queries(rows, [(rows.num_rows, wish)])


def _texts(ids: Sequence[str | int]) -> tuple[str, ...]:
    """Return ids as text. Integers are written as prepare writes them."""
    return tuple(str(each) for each in ids)


def retrieved(retriever: Retriever, scored: Scores) -> tuple[Response, int]:
    """Return the best items and scores of each row, best first (null for a row in bad_rows), and
    the total number of items.
    """
    found: list[Found | None] = list(scored.scores)
    positions = [each.positions for each in found if each is not None]
    values = retriever.items.values_at(np.concatenate([np.zeros(0, np.int64), *positions])).to_pylist()
    items: list[list[str] | None] = []
    begin = 0
    for each in found:
        items.append(None if each is None else values[begin : begin + len(each.positions)])
        begin += 0 if each is None else len(each.positions)
    body = {
        "artifact": retriever.version,
        "items": items,
        "scores": [None if each is None else each.scores.tolist() for each in found],
        "bad_rows": [row.as_dict() for row in scored.refused],
    }
    headers = {"X-Artifact-Version": retriever.version}
    return Response(msgspec.json.encode(body), headers=headers, media_type=JSON_TYPE), len(values)
