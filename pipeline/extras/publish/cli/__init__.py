"""The verb that publishes deltas."""
