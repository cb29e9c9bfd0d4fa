"""Collectives between ranks: precisions, shared memory, waits."""
