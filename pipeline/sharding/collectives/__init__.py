"""Replace collectives between the ranks of one host."""
