"""Create a project folder for a raw file: the verb `init`."""
