"""List, verify, show and export checkpoints: the verb `checkpoints`."""

FUNCTIONS = {"export_table_of_run": "pipeline.extras.checkpoints.cli.checkpoints:export_table_of_run"}
