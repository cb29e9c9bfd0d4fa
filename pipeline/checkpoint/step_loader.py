"""Fill a model and its optimizers from a saved step, and find the newest step that verifies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torchrec.optim.keyed import KeyedOptimizer

from pipeline.checkpoint import random_state
from pipeline.checkpoint.chains import open_reader
from pipeline.checkpoint.collective_errors import Ranks
from pipeline.checkpoint.owners import SHARD, check_random_state
from pipeline.checkpoint.reshard import (
    begin_stored_rows,
    check_fit,
    fill_row_states,
    fill_stored_rows,
    grown_tables,
    stored_keys,
    without,
)
from pipeline.checkpoint.step_writer import StepWriter
from pipeline.checkpoint.steps import METADATA, file_path, list_steps, read_manifest, step_path
from pipeline.checkpoint.tables import Replicas, flatten, inventory_of_state, inventory_of_step, merge
from pipeline.checkpoint.tensors import StepTensors
from pipeline.runtime.errors import CheckpointError, DamagedError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.checksums import read_verified

logger = get_logger(__name__)


@dataclass(frozen=True)
class Trained:
    """The objects whose state a step holds. With `optimizer` None only the model is filled."""

    model: nn.Module
    optimizer: KeyedOptimizer | None

    def state(self) -> dict[str, Any]:
        state = {"model": self.model.state_dict()}
        # Plain SGD has no state, and DCP stores an empty dict as a pickled value.
        if self.optimizer is not None and flatten(own := self.optimizer.state_dict()):
            state["optimizer"] = own
        return state

    def take(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state.get("optimizer", {"state": {}}))


@dataclass(frozen=True)
class Loaded:
    """The result of loading. is_same: model and optimizer have exactly the step's values. `random`
    is the state of this rank's random generators; None if no rank restores its generators.
    """

    is_same: bool
    random: bytes | None


class StepLoader:
    """Loads steps. All methods are collective."""

    def __init__(
        self, folder: str, trained: Trained, ranks: Ranks, replicas: Replicas | None, average_row_state: bool
    ) -> None:
        self._folder, self._trained, self._ranks = folder, trained, ranks
        self._replicas, self._average_row_state = replicas, average_row_state
        self._is_local = storage.is_local(folder)

    def manifest(self, step: int) -> dict[str, Any]:
        return self._ranks.read(lambda: read_manifest(step_path(self._folder, step)), self._is_local)

    def load(self, step: int, manifest: dict[str, Any], grow: Callable[[str], None] | None = None) -> Loaded:
        """Load a step. `grow` fills model and optimizer from a step with smaller tables; if `grow`
        is None, such a step is refused. Raises DamagedError, which leaves the state partly
        overwritten, or CheckpointError if the step does not fit.
        """
        path = step_path(self._folder, step)
        reader = self._ranks.read(lambda: open_reader(path, manifest), self._is_local)
        tensors = self._ranks.read(lambda: StepTensors(path, reader), self._is_local)
        random = self._ranks.read(lambda: self._read_random_state(path, manifest), self._is_local)
        self._ranks.read(lambda: self._check_files_of_hooks(path, manifest), self._is_local)
        state = self._trained.state()
        wanted = merge(self._ranks.gather(inventory_of_state(flat := flatten(state))))
        recut = check_fit(
            tensors,
            wanted,
            storage.dirname(self._folder),
            with_optimizer=self._trained.optimizer is not None,
            average_row_state=self._average_row_state,
            may_grow=grow is not None,
        )
        if grow is not None and grown_tables(inventory_of_step(tensors), wanted):
            grow(path)
            return Loaded(False, random)
        keyed = self._of_this_host(path, manifest, state, may_load_own=not recut)
        stored = stored_keys(flat)  # tensors that are not in memory
        try:
            dcp.load(without(keyed, [*recut, *stored]), storage_reader=reader, process_group=self._ranks.group)
        except CheckpointException as error:
            self._raise_cause(path, error)
        self._ranks.read(lambda: begin_stored_rows(tensors, flat, stored), self._is_local)
        self._ranks.read(lambda: fill_row_states(tensors, flat, recut, wanted), self._is_local)
        kept = [key for key in stored if key not in recut]
        self._ranks.read(lambda: fill_stored_rows(tensors, flat, kept), self._is_local)
        self._trained.take(state)
        if self._replicas:
            self._replicas.equal = not self._replicas.holds_own_tables(manifest)
        return Loaded(not recut, random)

    def _of_this_host(
        self, path: str, manifest: dict[str, Any], state: dict[str, Any], may_load_own: bool
    ) -> dict[str, Any]:
        """Return the state with the keys that it has in the step. If hosts train separate tables,
        these are the keys of this host. Raises CheckpointError if the tables' columns must be
        split differently.
        """
        own = self._replicas is not None and self._replicas.holds_own_tables(manifest)
        if own and not may_load_own:
            raise CheckpointError(
                f"checkpoint {path} holds each host's own tables, and the plan cuts their columns elsewhere: keep the plan "
                "(planner=file planner.plan_file=<run>/plan.json), or start from their mean: run_dir=<another> "
                f"warm_start.run={storage.dirname(self._folder)}"
            )
        self._log_replicas(manifest, own)
        return self._replicas.state_to_load(state) if own and self._replicas else state

    def _raise_cause(self, path: str, error: CheckpointException) -> None:
        for cause, _ in error.failures.values():
            if isinstance(cause, DamagedError):
                raise cause from None
            if isinstance(cause, OSError) and self._is_local:
                raise DamagedError(str(cause)) from None
            if isinstance(cause, OSError):
                raise CheckpointError(f"checkpoint {path} cannot be read: {cause}") from None
        raise CheckpointError(_misfit(path, error)) from None

    def _log_replicas(self, manifest: dict[str, Any], own: bool) -> None:
        stored = manifest.get("replicas") or {}
        if not stored.get("apart") or not self._ranks.context.is_main:
            return
        if own:
            logger.info(
                "step %d holds tables of each of %d hosts: each goes on with its own",
                manifest["step"],
                stored["num_hosts"],
            )
        else:
            logger.warning(
                "step %d holds tables of each of %d hosts: their mean is loaded", manifest["step"], stored["num_hosts"]
            )

    def _check_files_of_hooks(self, path: str, manifest: dict[str, Any]) -> None:
        """Verify the files that hooks have added, which they read after the step is loaded."""
        if self._trained.optimizer is None:  # an evaluation, which runs no hooks
            return
        for name, entry in manifest["files"].items():
            if not (SHARD.fullmatch(name) or random_state.rank_of(name) or name == METADATA):
                read_verified(file_path(path, manifest, name), entry)

    def _read_random_state(self, path: str, manifest: dict[str, Any]) -> bytes | None:
        """Return this rank's random state, or None if the step was saved by another number of ranks."""
        context = self._ranks.context
        name = random_state.file_name(context.rank)
        states = [each for each in manifest["files"] if random_state.rank_of(each)]
        if len(states) != manifest["world_size"]:
            raise DamagedError(f"{path} names {len(states)} random states and world_size {manifest['world_size']}")
        if manifest["world_size"] != context.world_size:
            return None
        content = read_verified(where := file_path(path, manifest, name), manifest["files"][name])
        check_random_state(where, manifest, context.rank, content)
        return content


def newest_usable(
    folder: str, ranks: Ranks, writer: StepWriter, use: Callable[[int], dict[str, Any]]
) -> dict[str, Any] | None:
    """Return what `use` returns for the newest step that is not damaged; None if there is no step.
    Collective. `use` raises DamagedError for a damaged step. Raises CheckpointError if there are
    steps but none can be used.
    """
    steps, problems = ranks.read(lambda: list_steps(folder), storage.is_local(folder)), []
    lost: set[int] = set()
    for step in reversed(steps):
        if step in lost:
            continue
        try:
            return use(step)
        except DamagedError as error:
            problems.append(f"step {step}: {error}")
            lost |= (own := _lost_with(folder, ranks, writer, step))
            what = f"checkpoint step {step} does not verify ({error})"
            if len(own) > 1:
                what += f"; it builds on step {min(own)}, which is damaged, so that {len(own)} steps are lost"
            earlier = max((other for other in steps if other < step and other not in lost), default=None)
            logger.warning("%s; going back to %s", what, "nothing" if earlier is None else f"step {earlier}")
    if problems:
        raise CheckpointError(
            f"none of the {len(steps)} checkpoints in {folder} can be used ({'; '.join(problems)[:600]}); "
            "restore that folder from a copy, or choose another run_dir"
        )
    return None


def _lost_with(folder: str, ranks: Ranks, writer: StepWriter, step: int) -> set[int]:
    """Return the damaged step, and the steps of the same chain that depend on it. Collective."""
    path = step_path(folder, step)
    chain = ranks.from_main(lambda: writer.known_chain(path))
    if len(chain) == 1:
        return {step}
    for number, member in enumerate(chain):
        if not writer.is_intact_itself(member):
            return set(chain[number:])
    return {step}


def _misfit(path: str, error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if "Error" in line]
    return (
        f"checkpoint {path} does not fit this model, optimizer or plan: {(lines or [str(error)])[-1][:400]}. "
        "Train with the config in its manifest.json, or choose another run_dir"
    )
