"""List, compare and tag runs, show a run as a page, and measure which features matter: the verbs `runs` and `report`."""

COMPONENTS = {"hook": "pipeline.extras.runs.hooks"}
FUNCTIONS = {
    "compare_runs": "pipeline.extras.runs.compare:compare",
    "config_of_run": "pipeline.extras.runs.again:config_of_run",
    "find_runs": "pipeline.extras.runs.folder:find_runs",
    "keep_stats": "pipeline.extras.runs.evaluation_stats:keep_stats",
    "open_run": "pipeline.extras.runs.folder:open_run",
    "permutation_importance": "pipeline.extras.runs.permutation:permutation_importance",
    "render_tile": "pipeline.extras.runs.report:render_tile",
    "row_file": "pipeline.extras.runs.row_file:row_file",
    "rows_of_runs": "pipeline.extras.runs.listing:as_rows",
    "slice_rows": "pipeline.extras.runs.slices:SliceRows",
    "sorted_runs": "pipeline.extras.runs.listing:sorted_runs",
    "stats_collector": "pipeline.extras.runs.stats_collector:StatsCollector",
    "try_report": "pipeline.extras.runs.report:try_report",
}
