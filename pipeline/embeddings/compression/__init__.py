"""Compression kinds, one file each, found by their registered names. kind.py defines a kind."""
