"""List, compare and tag runs, show a run as a page, and measure which features matter: the verbs `runs` and `report`."""

COMPONENTS = {"hook": "pipeline.extras.runs.hooks"}
FUNCTIONS = {
    "config_of_run": "pipeline.extras.runs.again:config_of_run",
    "keep_stats": "pipeline.extras.runs.evaluation_stats:keep_stats",
    "permutation_importance": "pipeline.extras.runs.permutation:permutation_importance",
    "row_file": "pipeline.extras.runs.row_file:row_file",
    "slice_rows": "pipeline.extras.runs.slices:SliceRows",
    "stats_collector": "pipeline.extras.runs.stats_collector:StatsCollector",
    "try_report": "pipeline.extras.runs.report:try_report",
}
