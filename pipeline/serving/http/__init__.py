"""Serve an artifact's scores over HTTP."""
