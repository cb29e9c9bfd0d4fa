"""Train tables with managed collision: ids without bound get rows, and rare ids give their rows up (docs/do/embeddings.md)."""

FUNCTIONS = {"add_managed_tables": "pipeline.extras.managed_collision.managed_tables:add_managed_tables"}
