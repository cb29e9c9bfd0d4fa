"""Train tables with managed collision: any number of ids share the rows, and rare ids lose their
rows (docs/do/embeddings.md).
"""

COMPONENTS = {"compression": "pipeline.extras.managed_collision.kind"}
FUNCTIONS = {"add_managed_tables": "pipeline.extras.managed_collision.managed_tables:add_managed_tables"}
