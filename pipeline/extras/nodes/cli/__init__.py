"""The verb of this extra."""
