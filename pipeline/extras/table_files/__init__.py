"""Fill tables with vectors from files before training: `tables.<name>.init.file` (docs/do/config.md)."""

FUNCTIONS = {"fill_from_files": "pipeline.extras.table_files.fill:fill_from_files"}
