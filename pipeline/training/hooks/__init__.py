"""What happens around training steps: saving, logging, profiling, early stopping."""
