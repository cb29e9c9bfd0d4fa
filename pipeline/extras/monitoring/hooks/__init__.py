"""Hooks that send training metrics to other services."""
