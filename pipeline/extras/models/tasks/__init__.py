"""Losses and metrics of the models of this extra."""
