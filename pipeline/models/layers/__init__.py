"""Define the layers that models are built from."""
