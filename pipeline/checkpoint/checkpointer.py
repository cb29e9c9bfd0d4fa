"""Save training state as immutable, verified steps, and restore it under any plan and number of ranks.

    <folder>/step_00000300/  __0_0.distcp ... .metadata   format of torch.distributed.checkpoint, resharded on load
                             random_00000.json ...        the random generators of each rank
                             manifest.json                step, sizes and checksums, and the run's description

Every rank writes into a new attempt, checksums its own bytes, makes them durable and reads them back. The
commit is one rename, or in an object store one manifest (runtime/storage/atomic.py). Loading uses only
verified bytes.
"""

from __future__ import annotations

import platform
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from importlib import metadata as installed
from typing import Any

from torch import nn
from torchrec.optim.keyed import KeyedOptimizer

from pipeline.checkpoint import random_state
from pipeline.checkpoint.changes import CHECKPOINT, Differential, ShardRows
from pipeline.checkpoint.collective_errors import Ranks
from pipeline.checkpoint.owners import Owner
from pipeline.checkpoint.retention import Retention
from pipeline.checkpoint.shards import PINNED_BYTES, HostCopy, ShardPlanner, bytes_to_write
from pipeline.checkpoint.step_loader import StepLoader, Trained, newest_usable
from pipeline.checkpoint.step_writer import Save, StepWriter, shortage
from pipeline.checkpoint.steps import (
    FORMAT_VERSION,
    LINK_VERSION,
    PACKED_VERSION,
    list_steps,
    read_manifest,
    read_step_file,
    step_folders,
    step_name,
    step_path,
)
from pipeline.checkpoint.tables import Replicas, flatten
from pipeline.devices.base import in_host_memory
from pipeline.runtime.byte_counts import show_bytes
from pipeline.runtime.errors import CheckpointError, DamagedError, StepTakenError
from pipeline.runtime.host_memory import free_host_bytes, used_by_this_process
from pipeline.runtime.logs import fields, get_logger
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.runtime.storage import storage


class InFlight:
    """A thread that the interpreter waits for at exit, so that a save that has started is committed."""

    def __init__(self, step: int, work: Callable[[], None]) -> None:
        self.step, self.started = step, time.monotonic()
        self._future: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(work,), name=f"save-{step}")
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # wait() raises it again on the training thread
            self._future.set_exception(error)
        else:
            self._future.set_result(None)

    @property
    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        """Wait for the end of the work, and raise its exception."""
        self._thread.join()
        self._future.result()


LIBRARIES = ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "numpy")
logger = get_logger(__name__)


class Checkpointer:
    """Saves and restores a sharded model and its optimizers. All methods are collective.

    `about` goes into every manifest: resolved config, plan, data set fingerprint. With `optimizer`
    None only the model is restored (evaluation, export). `asynchronous` writes in a thread over a
    separate process group. `staging` is the local folder where files for an object store are
    written first. `fence` is a function that raises OSError on rank 0 if this run must not commit
    any more. `replicas`: hosts train separate tables; steps hold the mean of these tables and, if
    they differ, also each host's tables. `differential`: most steps hold only the rows that changed
    since the step before (pipeline.checkpoint.chains).
    """

    # The caller chooses each of these separately, and tests use every combination.
    def __init__(
        self,
        folder: str,
        model: nn.Module,
        optimizer: KeyedOptimizer | None,
        context: DistributedContext,
        keep_last_n: int = 2,
        about: dict[str, Any] | None = None,
        average_row_state: bool = False,
        *,
        keep_best_n: int = 0,
        best_metric: str = "ne",
        asynchronous: bool = False,
        staging: str = ".staging",
        fence: Callable[[], None] | None = None,
        replicas: Replicas | None = None,
        differential: Differential | None = None,
    ) -> None:
        assert replicas is None or differential is None, "hosts' averages change every row"
        self.folder, self.asynchronous = folder, asynchronous
        self._trained, self._context = Trained(model, optimizer), context
        self._about, self._staging = about or {}, staging
        self._replicas = replicas
        self._is_local = storage.is_local(folder)
        self._retention = Retention(keep_last_n, keep_best_n, best_metric)
        self._ranks = Ranks(context, own_group=asynchronous)
        self._steps = step_folders(folder, staging)
        self._writer = StepWriter(self._steps, self._ranks, self._retention, fence)
        self._loader = StepLoader(folder, self._trained, self._ranks, replicas, average_row_state)
        self._planners = {is_link: ShardPlanner(context, self._ranks.group) for is_link in (False, True)}
        self._host_copies = {is_link: HostCopy() for is_link in (False, True)}
        self._differential = differential
        # the step that a link may build on; None: the next step is a base
        self._previous: int | None = None
        # the argument of the last restore_latest(), also used by a rollback
        self._grow: Callable[[str], None] | None = None
        self._taken: ShardRows | None = None  # the changed rows of a save that has not ended
        self._in_flight: InFlight | None = None

    def save(self, step: int, values: dict[str, Any] | None = None, files: dict[str, bytes] | None = None) -> str:
        """Write step `step` and return the path of its folder. `values` (position, metrics) go into
        its manifest, and this rank's `files` are stored next to it. An asynchronous save returns
        when the state is copied; wait() or the next save() reports its result.

        Raises CheckpointError if a rank could not write, so nothing is committed; or if the
        previous asynchronous save failed, so this save was not started.
        """
        self.wait()
        path = step_path(self.folder, step)
        is_taken, chain = self._ranks.from_main(lambda: (step in list_steps(self.folder), self._link()))
        if is_taken:
            raise StepTakenError(
                f"{path} is already committed: does another run write to this folder? Choose another run_dir"
            )
        self._taken = self._differential.rows.take(CHECKPOINT) if self._differential else None
        try:
            save = self._prepare(step, values or {}, chain, files or {})
            if self.asynchronous:
                self._in_flight = InFlight(step, lambda: self._write_beside_training(save))
            else:
                self._writer.write(save)
                self._settle(step)
        except BaseException:
            self._settle(None)
            raise
        return path

    def _prepare(
        self, step: int, values: dict[str, Any], chain: dict[str, Any] | None, files: dict[str, bytes]
    ) -> Save:
        """Return a full step to save, or a link if `chain` names the step that it builds on."""
        state = self._trained.state()
        if chain is not None:
            assert self._differential is not None and self._taken is not None
            state = self._differential.link_state(flatten(state), self._taken, self._context.rank)
        elif self._replicas:
            state = self._replicas.state_to_save(state)
        planner = self._planners[chain is not None]
        plan = planner.plan(state)
        tensors = planner.tensors()
        self._check_space(bytes_to_write(tensors), 1, 0, f"step {step}")
        owner = Owner(self._ranks.from_main(lambda: uuid.uuid4().hex), step, self._context.rank)
        manifest = self._describe(owner, values)
        if chain is not None:
            assert self._differential is not None
            manifest |= {"format_version": LINK_VERSION, "chain": chain}
            manifest |= {"format_version": PACKED_VERSION, "packed": True} if self._differential.is_packed else {}
        return Save(
            owner,
            self._steps.begin(step_name(step), owner.save_id[:8]),
            plan,
            self._host_copies[chain is not None].fill(tensors) if self.asynchronous else tensors,
            random_state.capture_owned(asdict(owner)),
            manifest,
            files,
        )

    def _link(self) -> dict[str, Any] | None:
        """Return the chain entry of the next step, or None if the next step must be a base. Rank 0 only."""
        if self._differential is None or self._previous is None:
            return None
        try:
            path = step_path(self.folder, self._previous)
            return self._differential.link_after(path)
        except DamagedError as error:
            logger.warning("the next step is a base, for no link can be added to step %d: %s", self._previous, error)
            return None

    def _settle(self, committed: int | None) -> None:
        """End a save. committed=None means that the save failed; its changed rows are then saved by
        the next step.
        """
        if self._differential is not None and committed is not None:
            self._previous = committed
        elif self._differential is not None and self._taken is not None:
            self._differential.rows.put_back(CHECKPOINT, self._taken)
        self._taken = None

    def wait(self) -> None:
        """Wait for the commit of an asynchronous save. Raises CheckpointError once if that save failed."""
        if self._in_flight is None:
            return
        in_flight, self._in_flight = self._in_flight, None
        began = time.monotonic()
        if not in_flight.done:
            logger.info("waiting for step %d, which is still being saved", in_flight.step)
        try:
            in_flight.wait()
        except BaseException:
            self._settle(None)
            raise
        self._settle(in_flight.step)
        if (waited := time.monotonic() - began) > 0.1:
            logger.info("waited %.1f s for step %d to be saved", waited, in_flight.step)

    def close(self) -> None:
        """Wait for the save in progress and release the process group. Raises CheckpointError if
        the save failed."""
        self.wait()
        self._ranks.close()

    def check_free_space(self, num_saves: int | None = None) -> None:
        """Check the free space for the steps to keep, one attempt, and the host copy of an
        asynchronous save. `num_saves` is the number of future saves, if it is smaller than the
        number of steps to keep. Raises CheckpointError with the numbers.
        """
        state = self._trained.state()
        whole = self._replicas.state_to_save(state, average=False) if self._replicas else state
        self._planners[False].plan(whole)
        tensors = self._planners[False].tensors()
        num_bytes = bytes_to_write(tensors)
        if self.asynchronous:
            self._check_host_memory(num_bytes, PINNED_BYTES if any(not in_host_memory(one) for one in tensors) else 0)
        kept = self._retention.most_steps if num_saves is None else min(self._retention.most_steps, num_saves)
        # the links of a chain hold at most half of its base's bytes
        kept += -(-kept // 2) if self._differential else 0
        copies = kept + 1 if self._is_local else 1
        held = self._ranks.from_main(self._held_bytes)
        self._check_space(
            num_bytes, copies, held, f"room for {copies} checkpoints (those that are kept, and one being written)"
        )

    def newest(self) -> dict[str, Any] | None:
        """Return the manifest of the newest step that verifies; None if the folder holds no step.
        In an object store only sizes are verified here; bytes are verified while they are loaded.
        Raises CheckpointError if there are steps, but none can be used."""
        return newest_usable(self.folder, self._ranks, self._writer, self._writer.verify)

    def restore_latest(
        self, check: Callable[[dict[str, Any]], None] | None = None, grow: Callable[[str], None] | None = None
    ) -> dict[str, Any] | None:
        """Restore the newest step that verifies while it is read, and return its manifest; None if
        there is no step.

        `check` may refuse a manifest by raising CheckpointError before anything is read. `grow`
        fills model and optimizer from a step whose tables have fewer rows; if `grow` is None, such
        a step is refused. Raises CheckpointError as newest() and restore() do.
        """
        self._grow = grow

        def load(step: int) -> dict[str, Any]:
            manifest = self._loader.manifest(step)
            if check is not None:
                check(manifest)
            self._load(step, manifest)
            return manifest

        return newest_usable(self.folder, self._ranks, self._writer, load)

    def restore(self, step: int, verified: bool = False) -> dict[str, Any]:
        """Restore step `step` in place. Any plan and world size may have written it. Return its
        manifest. Raises CheckpointError if the step is missing, damaged (DamagedError), or does
        not fit this model and plan.
        """
        if step not in (steps := list_steps(self.folder)):
            raise CheckpointError(
                f"there is no step {step} in {self.folder}; there are steps {', '.join(map(str, steps)) or 'none'}"
            )
        try:
            manifest = self._loader.manifest(step)
            self._load(step, manifest)
        except DamagedError as error:
            path = step_path(self.folder, step)
            raise type(error)(f"checkpoint {path} cannot be used: {error}; there are steps {steps}") from None
        return manifest

    def read_file(self, step: int, name: str) -> bytes | None:
        """Return the content that save() received as file `name`, or None if there is no such file.
        Local. Raises DamagedError.
        """
        return read_step_file(step_path(self.folder, step), name)

    def clear_after(self, step: int) -> None:
        """Prepare the folder for a run that continues from `step`. Steps after `step` were found
        damaged, and the run will write them again, so they are renamed. Leftovers of killed
        saves are removed.
        """

        def clear() -> None:
            for later in (number for number in list_steps(self.folder) if number > step):
                logger.warning("step %d is set aside as %s", later, self._steps.set_aside(step_name(later)))
            self._steps.remove_leftovers()

        self._ranks.from_main(clear)

    def _describe(self, owner: Owner, values: dict[str, Any]) -> dict[str, Any]:
        return {
            "format_version": FORMAT_VERSION,
            "step": owner.step,
            "save_id": owner.save_id,
            "world_size": self._context.world_size,
            "libraries": library_versions(),
            **({"replicas": self._replicas.describe()} if self._replicas else {}),
            **values,
            **self._about,
        }

    def _write_beside_training(self, save: Save) -> None:
        began = time.monotonic()
        self._writer.write(save)
        seconds = time.monotonic() - began
        logger.info("step %d  committed after %.1f s beside training", save.step, seconds)

    def _check_space(self, num_bytes: int, copies: int, held_bytes: int, what: str) -> None:
        """Check the free space. `num_bytes` are the bytes of this rank. All ranks write to one
        folder. For an object store, the ranks of a host share the staging folder.
        """
        ranks = self._ranks.gather((platform.node(), num_bytes))
        here, _ = ranks[self._context.rank]
        sizes = [size for host, size in ranks if self._is_local or host == here]
        problem = shortage(self.folder if self._is_local else self._staging, copies * sum(sizes) - held_bytes, what)
        if found := next((text for text in self._ranks.gather(problem) if text), ""):
            raise CheckpointError(
                f"{found}: free as much, lower checkpoint.keep_last_n, or set checkpoint.folder elsewhere; earlier "
                "checkpoints are untouched"
            )

    def _check_host_memory(self, copy_bytes: int, pinned_bytes: int) -> None:
        """Check the free memory of this host. Both arguments are the bytes of this rank."""
        own = (platform.node(), copy_bytes + pinned_bytes, used_by_this_process())
        here = [(needed, used) for host, needed, used in self._ranks.gather(own) if host == own[0]]
        needed_bytes, free_bytes = sum(needed for needed, _ in here), free_host_bytes(sum(used for _, used in here))
        problem = ""
        if needed_bytes > free_bytes:
            problem = (
                f"an asynchronous save copies the state of the {len(here)} ranks on {own[0]} to host memory, which takes "
                f"{show_bytes(needed_bytes)}, and {show_bytes(max(free_bytes, 0))} are free there; set "
                "checkpoint.asynchronous=false, or spread the ranks over more hosts"
            )
        if found := next((text for text in self._ranks.gather(problem) if text), ""):
            raise CheckpointError(found)

    def _held_bytes(self) -> int:
        """Return the bytes of existing steps. These steps count as a part of the steps to keep."""
        held = 0
        for step in list_steps(self.folder) if self._is_local else []:
            try:
                files = read_manifest(step_path(self.folder, step))["files"]
                held += sum(entry["size_bytes"] for entry in files.values())
            except DamagedError:
                continue
        return held

    def _load(self, step: int, manifest: dict[str, Any]) -> None:
        """Load a step. Raises DamagedError, which leaves the state partly overwritten, or
        CheckpointError if the step does not fit.
        """
        path, began = step_path(self.folder, step), time.monotonic()
        loaded = self._loader.load(step, manifest, self._grow)
        if self._trained.optimizer is not None and loaded.random is not None:
            random_state.restore_random_state(loaded.random)
        self._writer.mark_verified(step)
        if self._differential is not None:  # averaged row-wise states belong to no step
            self._differential.rows.take(CHECKPOINT)
            self._previous = step if loaded.is_same else None
        if self._context.is_main:
            seconds = time.monotonic() - began
            told = fields(event="loaded", step=step, checkpoint=path, seconds=round(seconds, 3))
            logger.info("step %d  loaded from %s in %.1f s", step, path, seconds, extra=told)


def library_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = installed.version(name)
        except installed.PackageNotFoundError:
            continue
    return versions
