"""Schemas of every job and its parts: dataclasses, with no torch."""
