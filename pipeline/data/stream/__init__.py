"""Rows that keep coming: sources with offsets, and the journal of what each batch took."""
