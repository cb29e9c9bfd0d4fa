"""Compressed tables: parts, split ids, composed rows."""
