"""Find the items whose vectors score highest for a user's: indexes, towers, and requests."""
