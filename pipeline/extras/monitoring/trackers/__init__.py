"""Experiment trackers that logger.tracker names, one file each."""
