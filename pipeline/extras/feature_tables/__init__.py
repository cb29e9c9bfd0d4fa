"""Put raw columns by id into an artifact, so that requests send only ids (docs/do/serving.md#feature-tables)."""

FUNCTIONS = {
    "open_feature_tables": "pipeline.extras.feature_tables.tables:open_feature_tables",
    "write_feature_tables": "pipeline.extras.feature_tables.export:write_feature_tables",
}
