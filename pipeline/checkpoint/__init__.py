"""Save and restore training state as verified step folders."""
