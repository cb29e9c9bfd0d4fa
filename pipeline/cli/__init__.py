"""The command line: one thin file per verb, and the code that composes its job."""
