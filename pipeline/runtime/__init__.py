"""Processes, files, errors and logs: what every room stands on."""
