"""Kernels that rooms share: numbers by their position (Philox), and the LLVM intrinsics that compiled kernels use."""
