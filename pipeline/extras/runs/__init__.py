"""List, compare and tag runs, and show a run as a page: the verbs `runs` and `report`."""

FUNCTIONS = {"try_report": "pipeline.extras.runs.report:try_report"}
