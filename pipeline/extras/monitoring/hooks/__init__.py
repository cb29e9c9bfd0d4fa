"""Hooks that send a training's numbers elsewhere."""
