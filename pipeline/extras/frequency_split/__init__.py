"""Split a table into frequent rows, which every rank holds, and the rest, which is sharded
(docs/do/embeddings.md).
"""

COMPONENTS = {"compression": "pipeline.extras.frequency_split.kind"}
FUNCTIONS = {
    "accept_variable_batches": "pipeline.extras.frequency_split.variable_batches:accept_variable_batches",
    "choose_heads": "pipeline.extras.frequency_split.head_rows:choose_heads",
    "head_reports": "pipeline.extras.frequency_split.head_rows:head_reports",
    "in_order_of": "pipeline.extras.frequency_split.variable_batches:in_order_of",
    "leave_out_empty_bags": "pipeline.extras.frequency_split.variable_batches:leave_out_empty_bags",
    "resolve_split_tables": "pipeline.extras.frequency_split.head_rows:resolve_split_tables",
}
