"""Measure this machine for predictions of steps: the verb `calibrate`. The core reads its result."""
