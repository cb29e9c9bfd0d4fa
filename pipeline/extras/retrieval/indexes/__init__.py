"""Indexes of items' vectors, one file each."""
