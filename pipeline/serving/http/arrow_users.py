"""Read users with their items from an Arrow table.

It has a row for each user: the column `user` is a struct of the user's columns, and `items` is a
list of structs, one for each item. So pa.Table.from_pylist([{"user": {...}, "items": [{...}]}])
makes one.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from pipeline.runtime.errors import ServingError

USER, ITEMS = "user", "items"


def is_by_user(schema: pa.Schema) -> bool:
    """Return True if the columns are structs. Columns of these names may also be text."""
    if sorted(schema.names) != [ITEMS, USER]:
        return False
    user, items = schema.field(USER).type, schema.field(ITEMS).type
    is_list = pa.types.is_list(items) or pa.types.is_large_list(items)
    return bool(pa.types.is_struct(user) and is_list and pa.types.is_struct(items.value_type))


def fields_by_user(schema: pa.Schema) -> list[pa.Field]:
    """Return the raw columns: of the user, then of the items."""
    return [*schema.field(USER).type, *schema.field(ITEMS).type.value_type]


def split_by_user(table: pa.Table) -> tuple[pa.Table, pa.Table, Sequence[int]]:
    """Return the users, the items of all users, and the number of items of each user. `table` must
    be valid. Raises ServingError if a user or its items are missing.
    """
    users, items = (table[name].combine_chunks() for name in (USER, ITEMS))
    if not len(users):
        raise ServingError("there is no user: send a row for each user")
    for name, column in ((USER, users), (ITEMS, items)):
        if column.null_count:
            raise ServingError(f"{name} is null in {column.null_count} of {len(column)} rows")
    counts: list[int] = items.value_lengths().to_pylist()
    if 0 in counts:
        raise ServingError(f"items is empty in row {counts.index(0)}: send at least one item for each user")
    flat = items.flatten()
    if flat.null_count:
        raise ServingError(f"{flat.null_count} of {len(flat)} items are null: send a struct for each item")
    return _table(users), _table(flat), counts


def _table(structs: pa.StructArray) -> pa.Table:
    return pa.table(structs.flatten(), names=[field.name for field in structs.type])
