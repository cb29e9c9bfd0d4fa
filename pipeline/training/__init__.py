"""Training: the run, the trainer and its hooks, optimizers, evaluation."""
