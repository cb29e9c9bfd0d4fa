"""Compiled kernels of tables in tiers."""
