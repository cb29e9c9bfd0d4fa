"""Sources of streams, one file each, registered as "stream"."""
