"""What trains on a CPU: kernels, their threads, the exchange of one host's ranks, memory."""
