"""Prepare data on the nodes of a Ray cluster: `python -m pipeline prepare engine=ray` (docs/do/data.md)."""

FUNCTIONS = {"ray_executor": "pipeline.extras.ray_prepare.executor:RayExecutor"}
