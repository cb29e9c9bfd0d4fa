"""Turn raw rows into Parquet shards, and shards into batches."""
