"""Transforms of columns, a file each; composing a job loads them, so pyarrow is imported inside their methods only."""
