"""Components from outside the package: what a user adds without touching it."""
