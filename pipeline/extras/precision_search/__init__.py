"""Search the smallest mix of table precisions whose quality is within a budget (export with precision=auto)."""

FUNCTIONS = {"find_mix": "pipeline.extras.precision_search.search:find_mix"}
