"""Turn training state into an immutable, verified step folder and back.

    <folder>/step_00000300/  __0_0.distcp ... .metadata   what torch.distributed.checkpoint writes, resharded on load
                             manifest.json                step, sizes and checksums, and what the run says of itself

Every rank writes into a fresh attempt folder and checksums its own bytes; the rename of that folder, after
manifest.json is on disk, is the commit. `_commit` is the only place where it happens.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import uuid
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torchrec.optim.keyed import KeyedOptimizer

from pipeline import storage
from pipeline.checkpoint.metadata import TensorsOnlyReader
from pipeline.checkpoint.reshard import check_fit, fill_row_states, without
from pipeline.checkpoint.steps import (
    FORMAT_VERSION,
    MANIFEST,
    CheckpointError,
    damage,
    list_steps,
    read_manifest,
    step_path,
)
from pipeline.checkpoint.tables import flatten, inventory_of_state, merge
from pipeline.checkpoint.tensors import StepTensors
from pipeline.distributed import DistributedContext
from pipeline.logs import get_logger

ATTEMPT = ".attempt-"
logger = get_logger(__name__)


class Checkpointer:
    """Save and restore a sharded model and its optimizers; all methods but list_steps are collective.

    `about` goes into every manifest: resolved config, plan, data set fingerprint.
    `optimizer` None restores the model alone (evaluation, export).
    """

    def __init__(
        self,
        folder: str,
        model: nn.Module,
        optimizer: KeyedOptimizer | None,
        context: DistributedContext,
        keep_last_n: int = 2,
        about: dict[str, Any] | None = None,
        average_row_state: bool = False,
    ) -> None:
        self.folder = folder
        self._model, self._optimizer, self._context = model, optimizer, context
        self._keep_last_n = keep_last_n
        self._about = about or {}
        self._average_row_state = average_row_state

    def save(self, step: int, values: dict[str, Any] | None = None) -> str:
        """Write step `step` with `values` (position, metrics) in its manifest; the path of its folder.

        Raises:
            CheckpointError: a rank could not write; nothing is committed.
        """
        path = step_path(self.folder, step)
        if self._broadcast(os.path.exists(path)):
            raise CheckpointError(
                f"{path} is already committed: does another run write to this folder? Choose another run_dir"
            )
        attempt = storage.join(self.folder, f"{ATTEMPT}{step:08d}-{self._agreed_id()}")
        failure, files = "", {}
        try:
            dcp.save(self._state(), checkpoint_id=attempt)
            files = self._checksums(attempt)
        except (CheckpointException, OSError, RuntimeError) as error:  # CheckpointException is a BaseException
            failure = f"rank {self._context.rank}: {error}"
        reports = self._gather((files, failure))
        failures = [text for _, text in reports if text]
        if not failures and self._context.is_main:
            manifest = {
                "format_version": FORMAT_VERSION,
                "step": step,
                "world_size": self._context.world_size,
                "files": {name: entry for part, _ in reports for name, entry in part.items()},
                **(values or {}),
                **self._about,
            }
            try:
                _commit(attempt, path, manifest)
                self._purge(step)
            except OSError as error:
                failures = [f"rank 0: {error}"]
        failures = self._broadcast(failures)
        if failures:
            if self._context.is_main:
                shutil.rmtree(attempt, ignore_errors=True)
            raise CheckpointError(
                f"step {step} was not saved, earlier checkpoints are untouched: {'; '.join(failures)[:500]}. "
                f"Is the disk of {self.folder} full or read-only?"
            )
        return path

    def newest(self) -> dict[str, Any] | None:
        """The manifest of the newest step that verifies; None when the folder holds no step.

        Raises:
            CheckpointError: there are steps, and not one can be used.
        """
        steps, problems = list_steps(self.folder), []
        for step in reversed(steps):
            problem = self._verify(step)
            if not problem:
                return read_manifest(step_path(self.folder, step))
            logger.warning("checkpoint step %d does not verify (%s); going back to the one before", step, problem)
            problems.append(f"step {step}: {problem}")
        if problems:
            raise CheckpointError(
                f"none of the {len(steps)} checkpoints in {self.folder} can be used ({'; '.join(problems)[:600]}); "
                "restore that folder from a copy, or choose another run_dir"
            )
        return None

    def restore_latest(self) -> dict[str, Any] | None:
        """Restore the step that newest() names and return its manifest. Raises CheckpointError as it and restore do."""
        manifest = self.newest()
        return None if manifest is None else self.restore(manifest["step"], verified=True)

    def restore(self, step: int, verified: bool = False) -> dict[str, Any]:
        """Restore step `step` in place, whatever plan and world size wrote it, and return its manifest.

        Raises:
            CheckpointError: the step is missing, damaged, or does not fit this model and plan.
        """
        path = step_path(self.folder, step)
        if step not in (steps := list_steps(self.folder)):
            raise CheckpointError(f"there is no step {step} in {self.folder}; there are {steps}")
        if not verified and (problem := self._verify(step)):
            raise CheckpointError(f"checkpoint {path} cannot be used: {problem}; there are steps {steps}")
        state = self._state()
        tensors = StepTensors(path)
        wanted = merge(self._gather(inventory_of_state(flat := flatten(state))))
        recut = check_fit(
            tensors,
            wanted,
            storage.dirname(self.folder),
            with_optimizer=self._optimizer is not None,
            average_row_state=self._average_row_state,
        )
        try:
            dcp.load(without(state, recut), storage_reader=TensorsOnlyReader(path))
        except CheckpointException as error:
            raise CheckpointError(_misfit(path, error)) from None
        self._all_or_none(lambda: fill_row_states(tensors, flat, recut, wanted))
        self._model.load_state_dict(state["model"])
        if self._optimizer is not None:
            self._optimizer.load_state_dict(state["optimizer"])
        return read_manifest(path)

    def clear_after(self, step: int) -> None:
        """Make way for a run that goes on from `step`.

        Later steps did not verify, and the run will write them anew: they are set aside under another name. What
        killed saves have left is removed.
        """
        if self._context.is_main and storage.exists(self.folder):
            for later in (number for number in list_steps(self.folder) if number > step):
                aside = storage.join(self.folder, f".damaged-{later:08d}-{uuid.uuid4().hex[:8]}")
                os.rename(step_path(self.folder, later), aside)
            for name in storage.list_folder(self.folder):
                if name.startswith(ATTEMPT):
                    shutil.rmtree(storage.join(self.folder, name))
        dist.barrier()

    def _state(self) -> dict[str, Any]:
        state = {"model": self._model.state_dict()}
        if self._optimizer is not None:
            state["optimizer"] = self._optimizer.state_dict()
        return state

    def _checksums(self, attempt: str) -> dict[str, dict[str, Any]]:
        """Of the files that this rank wrote; rank 0 also of .metadata."""
        mine = [name for name in sorted(os.listdir(attempt)) if name.startswith(f"__{self._context.rank}_")]
        mine += [".metadata"] if self._context.is_main else []
        return {
            name: {"size_bytes": os.path.getsize(f"{attempt}/{name}"), "sha256": storage.sha256_of(f"{attempt}/{name}")}
            for name in mine
        }

    def _verify(self, step: int) -> str:
        """Empty when the step is intact, else what is wrong; ranks share the work and agree on the answer."""
        path = step_path(self.folder, step)
        problem = ""
        try:
            files = read_manifest(path)["files"]
            for name in sorted(files)[self._context.rank :: self._context.world_size]:
                problem = problem or damage(f"{path}/{name}", files[name])
            if not problem and self._context.is_main:
                TensorsOnlyReader(path).read_metadata()
        except pickle.UnpicklingError as error:
            problem = f"{path}/.metadata is refused: {error}"
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = f"unreadable manifest: {error}"
        return next((text for text in self._gather(problem) if text), "")

    def _purge(self, saved: int) -> None:
        """Of the steps up to the one just saved, keep the last few."""
        for step in [step for step in list_steps(self.folder) if step <= saved][: -self._keep_last_n]:
            shutil.rmtree(step_path(self.folder, step))

    def _all_or_none(self, read: Callable[[], None]) -> None:
        """Run what every rank reads by itself. Raises CheckpointError on all of them where one cannot."""
        problem = ""
        try:
            read()
        except CheckpointError as error:
            problem = f"rank {self._context.rank}: {error}"
        if found := next((text for text in self._gather(problem) if text), ""):
            raise CheckpointError(found)

    def _agreed_id(self) -> str:
        return self._broadcast(uuid.uuid4().hex[:8])

    def _broadcast(self, value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def _gather(self, value: Any) -> list[Any]:
        gathered: list[Any] = [None] * self._context.world_size
        dist.all_gather_object(gathered, value)
        return gathered


def _commit(attempt: str, path: str, manifest: dict[str, Any]) -> None:
    """Rank 0 only. Raises OSError when `path` exists: a committed step is never written again."""
    if os.path.exists(path):
        raise FileExistsError(f"{path} is already committed")
    storage.publish_text(storage.join(attempt, MANIFEST), json.dumps(manifest, indent=1))
    os.rename(attempt, path)
    storage.sync_folder(os.path.dirname(path))


def _misfit(path: str, error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if "Error" in line]
    return (
        f"checkpoint {path} does not fit this model, optimizer or plan: {(lines or [str(error)])[-1][:400]}. "
        "Train with the config in its manifest.json, or choose another run_dir"
    )
