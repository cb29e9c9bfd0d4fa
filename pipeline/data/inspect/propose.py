"""Propose the role of each column of a profile with a reason, and write it as a data config."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from pipeline.config.registry import components
from pipeline.data.inspect.lists import LIST_SHARE, SEPARATORS
from pipeline.data.inspect.profile import FEW_VALUES, LABEL_NAMES, Column, Profile
from pipeline.runtime.masking import one_line
from pipeline.runtime.shell_words import word

LEAKS_FROM = 0.97  # AUC of the label by one column alone
ID_NAME = re.compile(r"(^|_)(id|code|zip|hash|category|type|position)(_|$|\d*$)|id$", re.IGNORECASE)
TIME_NAME = re.compile(r"time|date|(^|_)ts($|_)", re.IGNORECASE)
USER_NAME = re.compile(
    r"(^|_)(user|member|customer|visitor|household|account|client|buyer|device|session|query|request)s?(_?(id|key|code|no))?$",
    re.IGNORECASE,
)
WEIGHT_NAME = re.compile(r"(sample|instance|row|example|training|case|loss|importance)_?weights?", re.IGNORECASE)
SENTINEL = re.compile(r"-9+(\.0*)?")  # a number that often stands for a missing value
DETERMINED = 0.5  # share of the rows with one label by a value of a column with many values, so that it is left out
SECONDS = 6.3e8, 2.2e9  # since 1970, of 1990 to 2039
NEW_VALUES = "a group of rows, such as a basket or a request"
ALL_NEW = 0.95  # of the values of the last rows are new
NEAR_UNIQUE = 0.9  # distinct values per row
WEIGHTED = 0.95  # of the elements of a list are id:weight
MAX_LENGTH = 50  # of a sequence that is proposed


@dataclass
class Proposal:
    """A proposal. roles: column -> (role, why); `config` as in a file of conf/data."""

    roles: dict[str, tuple[str, str]]
    config: dict[str, Any]
    remarks: list[str] = field(default_factory=list)


def propose(profile: Profile, name: str) -> Proposal:
    """Return a data config `name` for the columns, the role of each column with its reason, and
    points that the user should check.
    """
    if profile.format == "criteo_tsv":
        roles = {each.name: _criteo_role(each.name) for each in profile.columns}
        config: dict[str, Any] = {"name": name, "format": "criteo_tsv", "ids": {"min_frequency": 2}}
        return Proposal(roles, config, _remarks(profile, roles))
    separator = max(SEPARATORS, key=lambda each: sum(column.lists[each] for column in profile.columns))
    roles = {each.name: _role(each, profile, separator) for each in profile.columns}
    by_role: dict[str, list[str]] = {}
    for column, (role, _) in roles.items():
        by_role.setdefault(role, []).append(column)
    columns: dict[str, Any] = {"label": profile.label}
    cells: dict[str, Any] = {"values": profile.label_values} if profile.label_values else {}
    cells |= {"threshold": profile.label_threshold} if profile.label_threshold is not None else {}
    if others := [each for each in by_role["label"] if each != profile.label]:
        columns["labels"] = {profile.label: cells} | {each: {} for each in others}
    else:
        columns |= {f"label_{key}": value for key, value in cells.items()}
    columns |= {"weight": by_role["weight"][0]} if "weight" in by_role else {}
    columns |= {role: by_role[role] for role in ("dense", "sparse", "multi_hot") if role in by_role}
    if histories := by_role.get("sequence"):
        columns["sequence"] = {
            each: ({"beside": profile.beside[each]} if each in profile.beside else {"max_length": MAX_LENGTH})
            | {"shares": profile.sequences[each]}
            for each in histories
        }
    if weighted := [
        each.name for each in profile.columns if each.name in by_role.get("multi_hot", []) and each.weighted > WEIGHTED
    ]:
        columns["weighted"] = weighted
    if times := by_role.get("timestamp"):
        columns["timestamp"] = times[0]
    if ("multi_hot" in by_role or "sequence" in by_role) and separator != "|":
        columns["list_separator"] = separator
    columns |= {"null_values": profile.null_values} if profile.null_values else {}
    config = {"name": name, "format": profile.format}
    config |= {"delimiter": profile.delimiter} if profile.delimiter else {}
    config |= {"encoding": profile.encoding} if profile.encoding != "utf-8" else {}
    config |= {"quotes": profile.quotes} if profile.quotes != "doubled" else {}
    config |= {"header": profile.header} if profile.header else {}
    config |= {"dense_transform": _transform(profile, by_role.get("dense", [])), "columns": columns}
    users = [each for each in by_role.get("sparse", []) if USER_NAME.search(each)]
    users = users or [each.name for each in profile.columns if roles[each.name][1].startswith(NEW_VALUES)]
    config |= {"group_column": users[0]} if users else {}
    config["split"] = {"kind": "time" if times else "row_range", "validation_fraction": 0.1, "test_fraction": 0.1}
    config["ids"] = {"min_frequency": 2}
    remarks = _remarks(profile, roles)
    if not times:
        remarks.append(
            "no column is a time: the last rows validate and test; where rows are in no order of time, say split.kind=random"
        )
    return Proposal(roles, config, remarks)


def propose_format(path: str, name: str) -> tuple[str, str] | None:
    """Return the text of a data config, and a description of the file, if a registered format
    recognizes the file; otherwise None.
    """
    for form in components("format").values():
        if found := form().propose(path):
            config, described = found
            return _with_remarks(path, [described], {"name": name, **config}), described
    return None


def _role(column: Column, profile: Profile, separator: str) -> tuple[str, str]:
    """Return the role of a column (dense, sparse, multi_hot, sequence, timestamp, weight, label or left out) and the
    reason.
    """
    rows = profile.rows * (1 - column.missing)
    if column.name == profile.label:
        ones = [text for text, number in profile.label_values.items() if number]
        what = f"1 is {' or '.join(ones)}" if ones else "0 and 1"
        what = what if profile.label_threshold is None else f"1 from {profile.label_threshold:g} on"
        return "label", f"{what}, {profile.label_rate:.2%} are 1"
    if column.unusable:
        return "left out", column.unusable
    if not column.name.strip():
        return "left out", "it has no name"
    if column.distinct >= rows and column.whole > 0.99 and column.high - column.low <= 1.01 * rows:
        return "left out", "a number of the row"
    if column.distinct <= 1:
        return "left out", "one value" if column.distinct else "no value"
    if column.times > 0.99 or (TIME_NAME.search(column.name) and column.numbers > 0.99 and column.low > 1e8):
        return "timestamp", "times"
    if (
        column.whole > 0.99
        and SECONDS[0] <= column.low
        and column.high < SECONDS[1]
        and not ID_NAME.search(column.name)
    ):
        return "timestamp", "whole numbers that are seconds since 1970"
    if other := _other_label(column, profile):
        return other
    if WEIGHT_NAME.fullmatch(column.name) and column.numbers == 1.0 and column.low >= 0 and not column.missing:
        return "weight", f"the weight of a row by its name, {column.low:g} to {column.high:g}, mean {column.mean:.3g}"
    if column.alone_auc >= LEAKS_FROM:
        return "left out", f"it alone tells the label (AUC {column.alone_auc:.3f}): known only afterwards?"
    if column.signal.determined and (column.distinct <= FEW_VALUES or column.signal.determined_share >= DETERMINED):
        return "left out", f"{column.signal.determined}: known only afterwards?"
    if column.written_numbers > 0.95 and column.distinct > FEW_VALUES:
        return "left out", f"numbers as text, such as {column.examples[0]}: write them as 1234.5"
    if column.lists[separator] > LIST_SHARE and column.numbers < 0.5:
        owner = profile.sequences.get(column.name)
        if owner and _first_role(owner, profile, separator) == "sparse":
            return "sequence", f"a history of {owner}: it holds the same values, joined by {separator!r}"
        return "multi_hot", f"{column.lists[separator]:.0%} hold {separator!r}"
    if column.numbers > 0.99:
        if column.whole < 0.99 or any("." in example for example in column.examples):
            return "dense", "numbers with a decimal point"
        if ID_NAME.search(column.name) or column.distinct <= FEW_VALUES:
            return "sparse", f"{column.distinct:,} whole numbers" + (
                ", an id by its name" if ID_NAME.search(column.name) else ""
            )
        return "dense", f"{column.distinct:,} whole numbers"
    if column.new_share > ALL_NEW and column.distinct > FEW_VALUES and column.distinct <= 0.5 * rows:
        return (
            "left out",
            f"{NEW_VALUES}: {column.new_share:.0%} of its values in the last tenth of the rows are in no earlier row",
        )
    if column.distinct > NEAR_UNIQUE * rows:
        return "left out", f"{column.distinct:,} values in {rows:,.0f} rows: hardly any comes again"
    return "sparse", f"{column.distinct:,} values"


def _other_label(column: Column, profile: Profile) -> tuple[str, str] | None:
    """Return the role of a column of 0 and 1 that is another label by its name, or because it is 1 only in rows
    with label 1. None if it is not.
    """
    if column.distinct != 2 or (column.low, column.high) != (0.0, 1.0) or column.numbers < 1.0:
        return None
    implies = column.signal.determined.startswith("every row with '1' has label 1")
    if not implies and not LABEL_NAMES.fullmatch(column.name):
        return None
    why = f"0 and 1, and 1 only where {profile.label} is 1" if implies else "0 and 1 like a label, by its name"
    if column.missing > 0.001:
        return "left out", f"{why}: another label, but {column.missing:.0%} of its rows have no value"
    return "label", f"{why}: another label"


def _first_role(name: str, profile: Profile, separator: str) -> str:
    return _role(next(each for each in profile.columns if each.name == name), profile, separator)[0]


def _criteo_role(name: str) -> tuple[str, str]:
    return ("label" if name == "label" else "dense" if name.startswith("int_") else "sparse"), "Criteo's columns"


def _transform(profile: Profile, dense: list[str]) -> str:
    columns = [each for each in profile.columns if each.name in dense]
    counts = columns and all(each.low >= 0 for each in columns)
    skewed = any(each.high > 20 * max(each.mean, 1e-9) for each in columns)
    return "log1p" if counts and skewed else "standardize" if columns else "log1p"


def _remarks(profile: Profile, roles: dict[str, tuple[str, str]]) -> list[str]:
    found = []
    if profile.encoding == "latin-1":
        found.append(
            "the file is not in UTF-8; latin-1 reads all bytes, but check the values, and set encoding to gbk or another one if needed"
        )
    for column in profile.columns:
        role = roles[column.name][0]
        if role in ("dense", "sparse", "multi_hot") and column.missing > 0.5:
            found.append(f"{column.name}: {column.missing:.0%} of the rows have no value")
        if role == "dense" and column.examples and SENTINEL.fullmatch(column.examples[0]):
            found.append(
                f"{column.name}: {column.top_share:.0%} of the values are {column.examples[0]}; if that is a missing value, name it in "
                "data.columns.null_values"
            )
        if role in ("dense", "sparse") and 0.85 <= column.alone_auc < LEAKS_FROM:
            found.append(
                f"{column.name} alone has AUC {column.alone_auc:.3f}: is it known when a prediction is asked for?"
            )
    flat = [
        each.name for each in profile.columns if roles[each.name][0] in ("dense", "sparse") and each.top_share > 0.95
    ]
    if flat:
        found.append(
            f"one value has more than 95 % of the rows in {len(flat)} column(s): {', '.join(flat[:5])}{', ...' if len(flat) > 5 else ''}"
        )
    if not 0.001 <= profile.label_rate <= 0.999:
        found.append(f"label rate {profile.label_rate:.5f}: hardly any row is of the other class")
    labels = [name for name, (role, _) in roles.items() if role == "label" and name != profile.label]
    if labels:
        found.append(
            f"{', '.join(labels)}: further labels, which a model of several labels learns; a column that is known before "
            "belongs to data.columns.sparse instead"
        )
    for column in profile.columns:
        if column.signal.determined and roles[column.name][0] in ("dense", "sparse", "multi_hot"):
            found.append(f"{column.name}: {column.signal.determined}")
    label = next(each for each in profile.columns if each.name == profile.label)
    if label.missing > 0.001:
        found.append(
            f"{label.missing:.1%} of the rows have no label: prepare refuses more than data.max_quarantined_fraction"
        )
    if math.isnan(profile.label_rate):
        found.append("the label has no value that is a number")
    return found


def as_yaml(proposal: Proposal, profile: Profile) -> str:
    """Return the text of a file of conf/data. Columns that are left out are comments."""
    left_out = [(name, why) for name, (role, why) in proposal.roles.items() if role == "left out"]
    remarks = [
        f"{profile.rows:,} rows were read.",
        *(f"Left out: {name or '(no name)'}, {why}." for name, why in left_out),
    ]
    return _with_remarks(profile.path, [*remarks, *proposal.remarks], proposal.config)


def _with_remarks(path: str, remarks: list[str], config: dict[str, Any]) -> str:
    lines = [f"Proposed by `python -m pipeline inspect {word('source', path)}`: look it through.", *remarks]
    text = yaml.safe_dump(config, sort_keys=False, default_flow_style=None, width=110, allow_unicode=True)
    return "".join(f"# {line}\n" for line in lines) + text


def as_text(proposal: Proposal, profile: Profile) -> str:
    """Return the proposal as one line per column."""
    rows = [("column", "role", "missing", "distinct", "top", "AUC alone", "why")]
    for column in profile.columns:
        role, why = proposal.roles[column.name]
        unknown = "-" if column.unusable else ""
        alone = "-" if math.isnan(column.alone_auc) else f"{column.alone_auc:.3f}"
        rows.append(
            (
                one_line(column.name) or "(no name)",
                role,
                unknown or f"{column.missing:.1%}",
                unknown or f"{column.distinct:,}",
                unknown or f"{column.top_share:.1%}",
                alone,
                why,
            )
        )
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    head = f"{profile.path}: {profile.format}, {'' if profile.is_all else 'the first '}{profile.rows:,} rows, label {profile.label}, rate {profile.label_rate:.4f}"
    return "\n".join([head, *lines, *(f"worth a look  {remark}" for remark in proposal.remarks)])
