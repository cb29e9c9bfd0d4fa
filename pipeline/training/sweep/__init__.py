"""Search values of a training: a space of knobs, a study that remembers, rungs that prune, and a pool that runs trials."""
