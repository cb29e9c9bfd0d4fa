"""Read prepared shards, with the same global batches at any world size."""
