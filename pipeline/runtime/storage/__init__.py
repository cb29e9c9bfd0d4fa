"""Files by path or URI, published whole; leases."""
