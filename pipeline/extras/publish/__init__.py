"""Publish deltas of an artifact from later steps of its run:  python -m pipeline publish artifact=A

The verb publishes the newest step, or every step that a training saves. `publishing.when=every_minute` makes
the training itself publish. Servers read and apply deltas without this extra (docs/do/serving.md).
"""

COMPONENTS = {"hook": "pipeline.extras.publish.hook"}
