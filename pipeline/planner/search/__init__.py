"""Choose an option for each table and a rank for each shard, with a proven bound (numpy and scipy, no torch)."""
