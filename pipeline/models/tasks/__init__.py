"""Define tasks: the losses that models are trained with, and their metrics."""
