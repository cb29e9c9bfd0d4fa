"""Tests of pipeline/extras/diagnose."""
