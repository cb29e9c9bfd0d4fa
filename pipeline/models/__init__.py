"""Models, a file each: its config, registration and build; and the layers and tasks that they share."""
