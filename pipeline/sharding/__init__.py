"""Shard tables over ranks with TorchRec, and exchange between ranks."""
