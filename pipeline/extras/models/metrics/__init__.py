"""Metrics that an evaluation adds if trainer.metrics or evaluate's `metrics` names them."""
