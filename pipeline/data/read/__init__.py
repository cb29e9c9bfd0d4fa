"""Read prepared shards: the same global batches at any world size."""
