"""Show an explanation as an HTML page."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from pipeline.extras.pages.charts import Bar, bar_chart
from pipeline.runtime.pages.html import cards, document, figure, table

if TYPE_CHECKING:
    from pipeline.extras.explain_versions.explain import Explanation

MAX_BARS = 12


def render_explanation(found: Explanation, most: int) -> str:
    """Return the page, with at most `most` lines in each list."""
    from pipeline.extras.explain_versions.explain import tables_of

    total = found.total
    figures = [(f"{total.mean:+.5f}", "mean change of the score"), (f"{total.effect:.5f}", "mean size of the change")]
    figures += [(f"{total.ne:+.5f}", "change of NE")] if total.ne is not None else []
    body = [f"<h1>From {escape(found.old)} to {escape(found.new)}</h1>", cards([*figures, (f"{found.rows:,}", "rows")])]
    bars = [Bar(each.part, each.effect) for each in found.parts[:MAX_BARS]]
    if bars:
        chart = bar_chart("effects of parts", bars, form=".5f", whole_names=True)
        body.append(figure("Mean |change of score| if this part alone is swapped", chart))
    for title, headings, cells in tables_of(found, most):
        if cells:
            body += [f"<h2>{title}</h2>", table(headings, cells, range(1, len(headings)), title)]
    return document(f"From {found.old} to {found.new}", body)
