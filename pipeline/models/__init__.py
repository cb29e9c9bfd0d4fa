"""Define the models, one file each (config, registration, build), and the layers and tasks that
they share.
"""
