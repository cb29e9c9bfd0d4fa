"""One file an index of items' vectors."""
