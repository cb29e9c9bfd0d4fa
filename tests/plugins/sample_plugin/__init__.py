"""A package with one component of each kind, in a file each."""
