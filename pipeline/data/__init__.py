"""Prepare raw rows as Parquet shards, and read shards in batches."""
