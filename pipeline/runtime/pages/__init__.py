"""Build HTML pages that open from disk, without scripts and external resources."""
