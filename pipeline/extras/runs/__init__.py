"""List, compare and tag runs, show a run as a page, and measure which features matter: the verbs `runs` and `report`."""

FUNCTIONS = {
    "permutation_importance": "pipeline.extras.runs.permutation:permutation_importance",
    "try_report": "pipeline.extras.runs.report:try_report",
}
