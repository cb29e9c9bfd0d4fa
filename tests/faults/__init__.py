"""Faults that a run meets in production, each planted on purpose; catalogue.py lists them."""
