"""Prepare with many workers: pure functions over named immutable files, and the engines that call them."""
