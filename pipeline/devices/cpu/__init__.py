"""Train on a CPU: compiled kernels, their threads, the exchange between ranks of one host, and
memory.
"""
