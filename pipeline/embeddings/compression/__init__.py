"""Compression kinds: a file each, found by the name under which it registers itself. kind.py says what a kind is."""
