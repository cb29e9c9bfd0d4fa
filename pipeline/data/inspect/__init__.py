"""Inspect raw rows before they are prepared, and propose a data config."""
