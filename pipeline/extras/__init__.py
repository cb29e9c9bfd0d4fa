"""Optional parts.

The core never imports them and trains without them; they use the core's public functions.
"""
