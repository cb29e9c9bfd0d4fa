"""Turn text columns of Parquet files, which nobody need have checked, into text and the rows where it is none."""

from __future__ import annotations

import pyarrow as pa


def with_text(table: pa.Table, names: list[str]) -> pa.Table:
    """Columns of bytes read as text; whether they are is not_text's to say."""
    for name in names:
        kind = table.schema.field(name).type
        as_text = {pa.binary(): pa.string(), pa.large_binary(): pa.large_string()}.get(kind)
        if as_text:
            column = pa.chunked_array([chunk.view(as_text) for chunk in table[name].chunks], as_text)
            table = table.set_column(table.schema.get_field_index(name), name, column)
    return table


def not_text(table: pa.Table, names: list[str]) -> dict[int, str]:
    """Row -> reason for text that is not UTF-8, as Parquet files may hold it."""
    reasons: dict[int, str] = {}
    for name in names:
        column = table[name].combine_chunks()
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            for row, value in enumerate(_as_bytes(column).to_pylist()):
                if not _is_utf8(value):
                    reasons.setdefault(row, f"{name} is not UTF-8")
    return reasons


def _as_bytes(column: pa.Array) -> pa.Array:
    """The same values with bytes in place of text, which to_pylist() would decode."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return pa.DictionaryArray.from_arrays(column.indices, column.dictionary.view(pa.binary()))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        maker = pa.ListArray if pa.types.is_list(kind) else pa.LargeListArray
        mask = column.is_null() if column.null_count else None
        return maker.from_arrays(column.offsets, _as_bytes(column.values), mask=mask)
    return column.view(pa.binary() if pa.types.is_string(kind) else pa.large_binary())


def _is_utf8(value: bytes | list[bytes] | None) -> bool:
    try:
        for part in value if isinstance(value, list) else [value]:
            if part is not None:
                part.decode()
    except UnicodeDecodeError:
        return False
    return True
