"""Publish the steps that a training names, in a separate process, which the trainer's hook
`publishing` starts.

The first line of JSON on stdin says where to publish. Each further line names a step: {"step":
300}. Each is answered by a line on stdout: {"step": 300, "sequence": 7, ...}, {"step": 300,
"failed": "..."}, or {"step": 300, "stopped": "..."}, after which nothing more is published. The
process ends with its input, and with the training.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.checkpoint.steps import list_steps
from pipeline.config.jobs.evaluate import ExportJob
from pipeline.config.jobs.train import DeltaGateConfig
from pipeline.config.serving import CalibrationConfig
from pipeline.extras.publish.gate import DeltaRefusedError, Stats
from pipeline.extras.publish.job import PublishJob
from pipeline.extras.publish.publisher import OutgrownError, Publisher
from pipeline.runtime.errors import UserError
from pipeline.runtime.logs import configure_logging, get_logger
from pipeline.runtime.process.processes import die_with_parent
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.manifest import MANIFEST
from pipeline.runtime.storage.signature import requiring, signing
from pipeline.serving.artifact.deltas import deltas_folder, pinned_sequence, why_pinned
from pipeline.serving.artifact.export import export
from pipeline.training.run_state import folder_of

COMMIT_S = 600.0  # how long to wait for a save that is in progress
LOOK_S = 0.1
KEPT = 2  # artifacts, because a server may still be loading the previous one
NICE = 5  # steps of the training have priority
logger = get_logger("pipeline.publish")


@dataclass
class PublishOrder:
    """The first line of the worker's input, as JSON."""

    run: str
    artifact: str
    precision: str = "int8"
    calibration: dict[str, Any] = field(default_factory=dict)
    feature_tables: dict[str, str] = field(default_factory=dict)
    max_chain: float | None = 0.5
    gate: dict[str, Any] = field(default_factory=dict)
    sign_key: str | None = None
    require_signature: Any = None


class Worker:
    """Export the artifact from the first step if there is none, and publish a delta for each later
    step.

    The artifact's name is a link to <name>.000001, <name>.000002, ... Each of these artifacts
    begins a new chain at the step where the previous chain ended.
    """

    def __init__(self, order: PublishOrder) -> None:
        self._order = order
        self._publisher: Publisher | None = None
        self._history: list[Stats] = []  # of earlier chains
        self.stopped = ""  # why nothing more is published

    def prepare(self) -> None:
        """Load what deltas need before the first step comes. The answer to that step reports errors."""
        try:
            if self._has_artifact():
                self._open()
        except (UserError, OSError) as error:
            logger.warning("%s cannot be followed yet: %s", self._order.artifact, error)

    def _has_artifact(self) -> bool:
        return storage.is_file(storage.join(self._order.artifact, MANIFEST))

    def publish(self, step: int) -> dict[str, Any]:
        """Publish the step and return the answer's values. If the step was removed, only this step is left out."""
        began, cpu = time.monotonic(), time.process_time()
        try:
            self._await_commit(step)
            waited = time.monotonic() - began
            if not self._has_artifact():
                return {"sequence": 0, "artifact": self._begin(step)}
            delta = self._open().publish_step(step)
        except OutgrownError as error:
            logger.info("%s: a whole artifact follows", error)
            return self._outgrown(step)
        except DeltaRefusedError as error:
            self.stopped = str(error)
            return {"stopped": self.stopped}
        except (UserError, OSError) as error:
            self._publisher = None  # it may have taken what was not committed
            if (reason := self._why_pinned()) is not None:
                self.stopped = f"{error}{reason}"
                return {"stopped": self.stopped}
            return {"failed": str(error)}
        if delta is None:
            return {"sequence": None}
        logger.info(
            "delta %d of step %d: %.2f s for its commit, %s; %.2f s of CPU in all",
            delta.sequence,
            step,
            waited,
            self._open().stages,
            time.process_time() - cpu,
        )
        return {
            **self._begin_anew(step),
            "sequence": delta.sequence,
            "rows": int(delta.stats["rows"]),
            "new_values": int(delta.stats.get("new_values", 0)),
            "bytes": delta.size_bytes,
            "ne": delta.stats["ne"],
            "age_s": round(time.time() - delta.saved_at, 3),
        }

    def _outgrown(self, step: int) -> dict[str, Any]:
        """Begin a new chain at `step`, which has rows or values that a delta cannot add."""
        publisher = self._open()
        try:
            made = self._begin(step)
        except (UserError, OSError) as error:
            return {"failed": str(error)}
        self._history, self._publisher = publisher.history, None
        return {"sequence": 0, "artifact": made}

    def _await_commit(self, step: int) -> None:
        folder, until = folder_of(self._order.run), time.monotonic() + COMMIT_S
        while step not in (steps := list_steps(folder)):
            if time.monotonic() > until or any(other > step for other in steps):
                raise FileNotFoundError(f"step {step} is not in {folder}, which has {steps[-3:]}")
            time.sleep(LOOK_S)

    def _begin(self, step: int) -> str:
        """Export a complete artifact of `step` and let the artifact's name point to it.

        Return its folder.
        """
        order = self._order
        number = 1 + max((number for number, _ in self._generations()), default=0)
        output = f"{order.artifact}.{number:06d}"
        job = ExportJob(run=order.run, step=step, output=output, precision=order.precision, sign_key=order.sign_key)
        calibration = CalibrationConfig(**order.calibration)
        export(replace(job, calibration=calibration, feature_tables=order.feature_tables))
        os.symlink(os.path.basename(output), f"{order.artifact}.new")
        os.replace(f"{order.artifact}.new", order.artifact)
        for _, path in self._generations()[:-KEPT]:
            storage.remove(path)
        return output

    def _generations(self) -> list[tuple[int, str]]:
        """Return (number, folder) of each artifact of this name, the oldest first."""
        folder, name = os.path.split(self._order.artifact)
        found = [
            (each.removeprefix(f"{name}."), os.path.join(folder, each)) for each in storage.list_folder(folder or ".")
        ]
        return sorted((int(number), path) for number, path in found if number.isdigit())

    def _begin_anew(self, step: int) -> dict[str, Any]:
        """Begin a new chain if it is needed, and return the values of the answer. The delta of
        `step` has already passed the gate.
        """
        order, publisher = self._order, self._open()
        if (
            order.max_chain is None
            or not os.path.islink(order.artifact)
            or not publisher.is_chain_over(order.max_chain)
        ):
            return {}
        try:
            made = self._begin(step)
        except (UserError, OSError) as error:
            logger.warning("the chain of %s continues, because no new artifact can be made: %s", order.artifact, error)
            return {}
        self._history, self._publisher = publisher.history, None
        return {"artifact": made}

    def _open(self) -> Publisher:
        if self._publisher is None:
            order = self._order
            is_local = storage.is_local(order.artifact)
            job = PublishJob(
                artifact=order.artifact,
                run=order.run,
                follow=True,
                delta_gate=DeltaGateConfig(**order.gate),
                sign_key=order.sign_key,
                require_signature=order.require_signature,
            )
            self._publisher = Publisher(
                job, os.path.realpath(order.artifact) if is_local else order.artifact, self._history
            )
        return self._publisher

    def _why_pinned(self) -> str | None:
        """Return why servers are pinned to a delta, or None if they are not pinned."""
        folder = deltas_folder(self._order.artifact)
        try:
            return None if pinned_sequence(folder) is None else why_pinned(folder)
        except (UserError, OSError):
            return None


def serve(lines: Iterable[str], answer: Callable[[dict[str, Any]], None]) -> None:
    """Publish the steps in `lines`, one after the other."""
    lines = iter(lines)
    order = PublishOrder(**json.loads(next(lines)))
    with signing(order.sign_key), requiring(order.require_signature):
        worker = Worker(order)
        worker.prepare()
        for line in lines:
            step = int(json.loads(line)["step"])
            if worker.stopped:
                answer({"step": step, "stopped": worker.stopped})
                continue
            answer({"step": step, **worker.publish(step)})


def main() -> None:
    die_with_parent()
    os.nice(NICE)
    configure_logging(0)
    import torch

    torch.set_num_threads(1)

    def answer(values: dict[str, Any]) -> None:
        print(json.dumps(values), file=answers, flush=True)

    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints is not an answer
    serve(sys.stdin, answer)


if __name__ == "__main__":
    main()
