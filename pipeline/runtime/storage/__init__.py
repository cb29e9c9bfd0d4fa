"""Files by path or URI that appear only when they are complete; leases of run folders."""
