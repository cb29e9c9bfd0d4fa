"""The verbs of the shadow GPU."""
