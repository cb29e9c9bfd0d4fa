"""Average the dense layers over steps: EMA or SWA (trainer.average, docs/do/models.md)."""

COMPONENTS = {"hook": "pipeline.extras.averaging.hook"}
