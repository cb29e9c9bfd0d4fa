"""Use given vectors of ids as features, from a file by the values of the ids: `compression.kind=vectors`."""

COMPONENTS = {"compression": "pipeline.extras.vectors"}
