"""Export a checkpoint as an artifact, and score raw rows with it."""
