"""Turn a plan and batches into trained weights."""
