"""Shard tables over ranks with TorchRec, and exchange data between ranks."""
