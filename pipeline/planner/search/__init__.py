"""Turn arrays of sharding options into one option a table and one rank a shard, with a proven bound (no torch)."""
