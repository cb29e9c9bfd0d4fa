"""Define the models, one file each (config, registration, build), and their layers and tasks."""
