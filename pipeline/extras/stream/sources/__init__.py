"""Sources of streams, a file each, registered as "stream"."""
