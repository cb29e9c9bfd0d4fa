"""Ranks, their agent, watchdog, signals and threads."""
