"""Turn a checkpoint into an artifact, and an artifact and raw rows into scores."""
