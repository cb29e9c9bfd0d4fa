"""The verb `completion`."""
