"""Say what can be wrong with a checkpoint; both messages name the checkpoint, why, and what to do or where."""

from pipeline.runtime.errors import UserError


class CheckpointError(UserError):
    """A checkpoint cannot be used, or not be made."""

    code = "checkpoint"


class StepTakenError(CheckpointError):
    """The step to be saved is committed already: somebody else writes to the folder."""


class DamagedError(CheckpointError):
    """A file of a step is not what its manifest says: the step before it may be used instead."""
