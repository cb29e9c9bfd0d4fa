"""Export a two-tower with an index of its items, and find the best items for raw rows of users.

The core trains a two-tower; this extra serves it (docs/serving.md#retrieval).
"""

COMPONENTS = {"index": "pipeline.extras.retrieval.indexes"}
FUNCTIONS = {
    "export_towers": "pipeline.extras.retrieval.export:write_retriever",
    "describe_towers": "pipeline.extras.retrieval.export:describe",
    "load_retriever": "pipeline.extras.retrieval.retriever:Retriever.load",
    "load_retriever_for_files": "pipeline.extras.retrieval.for_files:load_for_files",
}
