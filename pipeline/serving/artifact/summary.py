"""Say what an export wrote: its certificate and sizes as a text for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.config.registry import from_extra
from pipeline.runtime.byte_counts import show_size
from pipeline.runtime.shell_words import word


@dataclass
class ExportSummary:
    """best_by: the metric if the step was chosen because it is the best of the run, else empty."""

    run: str
    step: int
    artifact: str
    version: str
    certificate: dict[str, Any]
    sizes: dict[str, Any]
    already_exported: bool = False
    seconds: float = 0.0
    best_by: str = ""

    @property
    def parity(self) -> dict[str, dict[str, Any]]:
        """Split -> scores, NE and AUC of the artifact compared with the trained model's."""
        splits: dict[str, dict[str, Any]] = self.certificate["splits"]
        return splits


def describe(summary: ExportSummary) -> str:
    """Return the lines that export prints."""
    from pipeline.serving.artifact.task_quality import measures

    sizes, certificate = summary.sizes, summary.certificate
    if "index" in certificate:
        return str(from_extra("describe_towers", f"run={summary.run}")(summary))
    ratio = sizes["tables_before"] / max(sizes["tables_after"], 1)
    lines = [title(summary), *_table_of_precisions(certificate["precisions"])]
    for split, parity in _by_label(certificate["splits"]):
        titles = measures(parity["ne"], parity["auc"])
        numbers = "".join(
            f"{title} {parity[key]:.5f} ({parity[f'{key}_delta']:+.6f}), " for key, title in titles.items()
        )
        lines.append(f"{split:<12}{numbers}scores within {parity['max_score_difference']:.2g} of the model's")
    lines.append(
        f"tables      {show_size(sizes['tables_before'])} -> {show_size(sizes['tables_after'])} ({ratio:.1f}x smaller); layers "
        f"{show_size(sizes['layers_before'])} -> {show_size(sizes['layers_after'])}, vocabularies {show_size(sizes['vocabularies'])}"
    )
    return "\n".join([*lines, *ending(summary)])


def _by_label(splits: dict[str, dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return the parity of each split or, if there are several labels, of each label."""
    found = []
    for split, parity in splits.items():
        of_tasks = parity.get("tasks", {})
        found += [(f"{split} {name} ", each) for name, each in of_tasks.items()] or [(split, parity)]
    return found


def _table_of_precisions(costs: dict[str, dict[str, Any]]) -> list[str]:
    """Return a line for each precision, with what the scores lose by it."""
    from pipeline.serving.artifact.task_quality import measures

    first = next(iter(costs.values()))
    titles = measures(first["ne_delta"], first["auc_delta"])
    heads = "".join(f"{title:>{max(12, len(title) + 2)}}" for title in titles.values())
    lines = [f"  {'precision':<11}{'tables':>12}{heads}{'score, most':>13}{'mean':>11}   on validation"]
    for name, cost in costs.items():
        deltas = "".join(f"{cost[f'{key}_delta']:>+{max(12, len(title) + 2)}.6f}" for key, title in titles.items())
        lines.append(
            f"  {name:<11}{show_size(cost['table_bytes']):>12}{deltas}"
            f"{cost['max_score_difference']:>13.2g}{cost['mean_score_difference']:>11.2g}"
        )
    return lines


def title(summary: ExportSummary) -> str:
    """Return the first line of what export prints."""
    best = f" (best by {summary.best_by})" if summary.best_by else ""
    return f"step {summary.step}{best} of {summary.run} as an artifact, version {summary.version}"


def ending(summary: ExportSummary) -> list[str]:
    """Return the last lines: where the artifact is, and the next command."""
    if summary.already_exported:
        line = f"already exported to {summary.artifact}: nothing to do"
    else:
        line = f"written to  {summary.artifact} ({show_size(summary.sizes['artifact'])}) in {summary.seconds:.1f} s"
    return [line, f"next        python -m pipeline serve {word('artifact', summary.artifact)}"]
