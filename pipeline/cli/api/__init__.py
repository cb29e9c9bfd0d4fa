"""The Python API: what the verbs of the command line do, as functions and objects for notebooks and scripts."""
