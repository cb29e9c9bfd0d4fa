"""The verb `canary`."""
