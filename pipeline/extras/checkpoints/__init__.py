"""List, verify, show and export checkpoints: the verb `checkpoints`."""
