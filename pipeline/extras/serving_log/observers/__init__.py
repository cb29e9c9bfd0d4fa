"""Observers of a server: a log of answered requests, and the drift of features and scores."""
