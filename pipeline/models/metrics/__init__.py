"""Define metrics of binary labels that an evaluation adds if trainer.metrics or evaluate's
`metrics` names them.
"""
