"""Metrics of binary labels that an evaluation adds where trainer.metrics or evaluate's `metrics` names them."""
