"""Save most checkpoints as the rows that changed since the step before (checkpoint.differential). The core reads them."""

FUNCTIONS = {"tracked_rows": "pipeline.extras.differential.tracked_rows:TrackedRows"}
