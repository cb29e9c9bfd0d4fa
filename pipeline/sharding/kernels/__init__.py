"""CPU kernels for table lookups and updates, compiled by Numba."""
