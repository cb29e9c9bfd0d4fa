"""The verb `semantic_ids`."""
