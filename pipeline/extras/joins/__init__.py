"""Join columns of tables to rows as of each row's time, and store them once: `data.joins` (docs/do/joins.md)."""

FUNCTIONS = {
    "changed_joins": "pipeline.extras.joins.rows:changed_joins",
    "check_joins": "pipeline.extras.joins.config:check_joins",
    "describe_joins": "pipeline.extras.joins.report:describe_joins",
    "join_tables": "pipeline.extras.joins.rows:JoinedTables",
    "read_joined": "pipeline.extras.joins.read:JoinedRowGroups",
    "record_joined": "pipeline.extras.joins.store:Recorder",
    "side_columns": "pipeline.extras.joins.read:JoinedColumns",
    "write_side_tables": "pipeline.extras.joins.store:write_side_tables",
}
