"""Make artifacts: quantize, prune, certify, package."""
