"""The verb `erase`."""
