"""Verbs of the serving log."""
