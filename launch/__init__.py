"""Launch jobs on schedulers.

A job is composed and validated on this machine, then runs where the scheduler starts it.
"""
