"""Train tables with managed collision: an unlimited number of ids share rows, and rare ids lose
theirs (docs/do/embeddings.md).
"""

COMPONENTS = {"compression": "pipeline.extras.managed_collision.kind"}
FUNCTIONS = {"add_managed_tables": "pipeline.extras.managed_collision.managed_tables:add_managed_tables"}
