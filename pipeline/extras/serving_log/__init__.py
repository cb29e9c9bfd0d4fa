"""Log served requests, prove that they are prepared and scored as in training, and join late labels to them.

docs/do/serving_log.md. `observers.log` and `observers.drift` of the server, and the verbs skew and join_labels.
"""

COMPONENTS = {"observer": "pipeline.extras.serving_log.observers"}
