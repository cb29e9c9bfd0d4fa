"""Measure what this machine's operations take, for pipeline.planner.step_time to predict steps from."""
