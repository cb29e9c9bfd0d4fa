"""Score raw or prepared rows with an artifact."""
