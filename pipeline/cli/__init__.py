"""The command line: one thin file a verb, and what composes its job."""
