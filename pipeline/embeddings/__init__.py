"""Resolve embedding tables against a data set, and build the modules that look them up."""
