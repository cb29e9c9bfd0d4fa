"""Rehearse a training job: a few ranks of any world, one after the other, on shadow GPUs."""
