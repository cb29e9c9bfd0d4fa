"""The verb `precompile`."""
