"""Tasks: what a model is trained for, its loss and its measures."""
