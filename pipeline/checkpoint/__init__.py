"""Turn training state into verified step folders and back."""
