"""Kernels that Numba compiles."""

# bits of a region's result: no call of the kernel returned False, and no call raised
ALL_TRUE, NONE_RAISED = 1, 2
