"""Hold the verb `diagnose`."""
