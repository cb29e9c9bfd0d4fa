"""Predict the time of a training step from a model's operations, a plan, the data's frequencies and a machine's measurements."""
