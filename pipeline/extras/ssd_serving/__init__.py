"""Serve tables from an SSD, with their most frequent rows in memory (memory=ssd,
docs/do/serving.md).
"""

FUNCTIONS = {"open_on_ssd": "pipeline.extras.ssd_serving.open:open_on_ssd"}
