"""Provide processes, files, errors and logs, which all other packages use."""
