"""Experiment trackers that logger.tracker names: a file each."""
