"""Hooks run around training steps, one module for each concern: logging, profiling, evaluation,
saving, rollback."""
