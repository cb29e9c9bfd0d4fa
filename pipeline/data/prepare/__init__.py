"""Prepare raw rows: vocabularies, splits, Parquet shards and dataset.json."""
