"""Serve tables from an SSD: their most frequent rows are copied into memory (memory=ssd, docs/do/serving.md)."""

FUNCTIONS = {"open_on_ssd": "pipeline.extras.ssd_serving.open:open_on_ssd"}
