"""Split a table into frequent rows, which every rank holds, and the rest, which is sharded
(docs/do/embeddings.md).
"""

COMPONENTS = {"compression": "pipeline.extras.frequency_split.kind"}
FUNCTIONS = {
    "choose_heads": "pipeline.extras.frequency_split.head_rows:choose_heads",
    "head_reports": "pipeline.extras.frequency_split.head_rows:head_reports",
    "resolve_split_tables": "pipeline.extras.frequency_split.head_rows:resolve_split_tables",
}
