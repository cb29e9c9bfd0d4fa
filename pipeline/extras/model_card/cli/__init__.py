"""The verb `card`."""
