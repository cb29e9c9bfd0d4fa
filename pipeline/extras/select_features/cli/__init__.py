"""The verb `select_features`."""
