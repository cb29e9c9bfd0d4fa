"""Generate data sets whose best possible AUC is known."""
