"""List every change that the shadow GPU makes to torch, TorchRec and FBGEMM, with its reason."""

from __future__ import annotations

from pipeline.extras.shadow.state import Patch


def all_patches() -> list[Patch]:
    """Return the patches of all modules in the order in which they are applied.

    Imports torch, TorchRec, FBGEMM.
    """
    from pipeline.extras.shadow import collectives, device, lookups, replication, torch_changes

    return [each for module in (device, torch_changes, lookups, collectives, replication) for each in module.patches()]


def apply() -> None:
    for each in all_patches():
        setattr(each.target, each.name, each.value)
