"""Compile the CPU kernels ahead of the first job: the verb `precompile`."""
