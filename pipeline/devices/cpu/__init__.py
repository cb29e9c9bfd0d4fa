"""Train on a CPU: compiled kernels, their threads, the exchange of one host's ranks, and memory."""
