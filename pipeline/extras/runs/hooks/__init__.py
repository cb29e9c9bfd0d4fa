"""Hooks that describe a run in its folder: the statistics of its tables, and the files that it was started from."""
