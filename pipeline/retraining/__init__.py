"""Retrain a model on windows of new data, and promote versions that pass a gate against the champion."""
