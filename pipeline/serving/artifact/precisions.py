"""Say which precision each table of an artifact has: what was asked for, or the smallest mix within a budget."""

from __future__ import annotations

from pipeline.config.serving import AUTO, PRECISIONS, ParityConfig
from pipeline.runtime.logs import get_logger
from pipeline.serving.artifact.quantize import nearest, row_bytes
from pipeline.serving.artifact.reference import Reference
from pipeline.serving.artifact.sensitivity import find_mix
from pipeline.serving.artifact.trained_model import TrainedModel

logger = get_logger(__name__)
MAX_NAMED = 8


def choose_precisions(
    reference: Reference, precision: str, tables: dict[str, str], ne_budget: float, limits: ParityConfig
) -> list[str]:
    """One a table. `tables` is what single ones have instead of `precision`; of a compressed table so have its parts.

    Raises:
        ServingError: a table has no such rows.
    """
    if precision != AUTO:
        return given_precisions(reference.trained, precision, tables)
    return _said(find_mix(reference, _fixed(reference.trained, tables), ne_budget, limits))


def given_precisions(trained: TrainedModel, precision: str, tables: dict[str, str]) -> list[str]:
    """As choose_precisions, of one that is not auto."""
    fixed = _fixed(trained, tables)
    found = [fixed.get(table.name) or nearest(table.embedding_dim, precision) for table in trained.tables]
    _log_larger_precisions([table.name for table in trained.tables], found, fixed, precision)
    return _said(found)


def _fixed(trained: TrainedModel, tables: dict[str, str]) -> dict[str, str]:
    """Table -> what it has by its name. Raises ServingError where it has no such rows."""
    fixed = {}
    for table in trained.tables:
        asked = tables.get(table.name) or tables.get(table.config_name)
        if asked is not None:
            row_bytes(table.embedding_dim, asked)
            fixed[table.name] = asked
    return fixed


def _said(found: list[str]) -> list[str]:
    counts = {name: found.count(name) for name in PRECISIONS if name in found}
    logger.info("precision  %s", ", ".join(f"{count} table(s) {name}" for name, count in counts.items()))
    return found


def _log_larger_precisions(names: list[str], found: list[str], fixed: dict[str, str], precision: str) -> None:
    missed = [name for name, has in zip(names, found, strict=True) if has != precision and name not in fixed]
    if missed:
        logger.info(
            "%d table(s) have no %s rows of their width and get the next larger: %s%s",
            len(missed), precision, ", ".join(missed[:MAX_NAMED]), ", ..." if len(missed) > MAX_NAMED else "",
        )  # fmt: skip
