"""Search sharding options given as arrays: one option a table and one rank a shard, with a proven bound (no torch)."""
