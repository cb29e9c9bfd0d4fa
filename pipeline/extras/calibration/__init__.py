"""Measure this machine for predictions of steps: the verb `calibrate`.

The planner reads its result.
"""
