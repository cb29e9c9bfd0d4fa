"""Train a run again without its least important features, and compare: the verb `select_features`."""
