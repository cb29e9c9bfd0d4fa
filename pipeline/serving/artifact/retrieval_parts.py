"""Say what the artifact of a two-tower has beside tables and the user's program (stdlib only)."""

from __future__ import annotations

from dataclasses import dataclass

ITEM_PROGRAM, ITEM_VECTORS, ITEM_VALUES, ITEM_INDEX = "item.pt2", "items.vectors", "items.arrow", "items.index"


@dataclass(frozen=True)
class RetrievalParts:
    """`user_features` and `item_features` are the batch's keys by tower, in its order; `item_feature` names the item.

    item.pt2 is the item's program; items.vectors has a row of `dim` float32 an item, items.arrow the items' raw values in
    the same order, items.index the index where it has a file. `search`: candidates that hnsw keeps.
    """

    item_feature: str
    user_features: list[str]
    item_features: list[str]
    dim: int
    num_items: int
    index: str
    search: int

    def features_of(self, tower: str) -> list[str]:
        return self.user_features if tower == "user" else self.item_features
