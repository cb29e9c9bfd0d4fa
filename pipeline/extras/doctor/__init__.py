"""Check that this machine can install, build and run the pipeline: the verb `doctor`."""
