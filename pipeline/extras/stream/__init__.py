"""Train on a stream: one training follows the files of a folder as they grow, or a Kafka topic.

`python -m pipeline retrain follow=true` runs it (docs/do/retraining.md).
"""

COMPONENTS = {"stream": "pipeline.extras.stream.sources", "hook": "pipeline.extras.stream.hook"}
FUNCTIONS = {"follow": "pipeline.extras.stream.follow:follow"}
