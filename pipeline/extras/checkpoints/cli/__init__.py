"""The verb `checkpoints`."""
