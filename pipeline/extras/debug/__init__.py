"""Trace the steps of a training (debug=profile), and find the layer whose numbers are not finite (debug=anomaly)."""

COMPONENTS = {"hook": "pipeline.extras.debug.hooks"}
