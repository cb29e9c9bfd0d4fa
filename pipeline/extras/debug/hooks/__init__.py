"""Hooks that look into the steps of a training."""
