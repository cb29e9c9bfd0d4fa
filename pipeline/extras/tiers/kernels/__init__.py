"""Compiled kernels of tables with tiers."""
