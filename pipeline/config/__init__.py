"""Schemas of all jobs and their parts, as dataclasses without torch."""
