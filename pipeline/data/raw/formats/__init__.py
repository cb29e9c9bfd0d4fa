"""Raw formats, one file each.

Composing a job loads them, so pyarrow is imported only inside their methods.
"""
