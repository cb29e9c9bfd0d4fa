"""Rehearse a training job: run a few of its ranks, one after the other, on shadow GPUs."""
