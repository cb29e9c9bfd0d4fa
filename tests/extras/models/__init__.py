"""Tests of the extra."""
