"""Run the tasks of a preparation on an existing Ray cluster.

Tasks exchange files, not objects. If a worker or a node dies, it leaves folders without a
completion mark, and Ray runs its tasks again on the remaining nodes. The driver is on the head
node. Run the same command again to resume after the finished tasks.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import ray
from ray.exceptions import RayTaskError

from pipeline.config.jobs.prepare import RayConfig
from pipeline.config.registry import load_plugins
from pipeline.data.prepare.executor import run_task
from pipeline.data.prepare.recipe import Recipe
from pipeline.extras.ray_prepare.node import set_token_mode
from pipeline.runtime.errors import ConfigError, DataError
from pipeline.runtime.logs import get_logger, progress
from pipeline.runtime.storage import storage

Item = TypeVar("Item")
Result = TypeVar("Result")
PROBE = "seen-by-all"  # a file in the staging folder that every worker must see
CONNECT_S = 20.0
JOIN_S = 120  # how long prepare waits for ray.min_nodes
TRANSIENT = [OSError]  # errors of a store or a shared file system that did not answer
logger = get_logger(__name__)


class RayExecutor:
    """Run each task with `threads` CPUs and the memory of recipe.resources."""

    in_order = False

    def __init__(self, recipe: Recipe, config: RayConfig) -> None:
        self._recipe, self._config = recipe, config
        self._options: dict[str, Any] = {
            "num_cpus": recipe.resources.threads,
            "memory": recipe.resources.memory_bytes,
            "max_retries": config.max_retries,
            "retry_exceptions": TRANSIENT,
        }

    @contextmanager
    def running(self) -> Iterator[None]:
        """Connect. Raises ConfigError if no cluster answers, or a task fits no node."""
        recipe = self._recipe
        with _connected(self._config):
            _check_tasks_fit(recipe.resources.threads, recipe.resources.memory_bytes)
            storage.make_folder(recipe.resources.staging)
            storage.publish_text(recipe.path(PROBE), recipe.key)
            self._shared = ray.put(recipe)
            yield

    def map(
        self,
        description: str,
        task: Callable[[Recipe, Item], Result],
        items: Iterable[Item],
        sizes: Sequence[float],
        at_once: int = 1,
    ) -> Iterator[Result]:
        """See Executor.map.

        Ray's dashboard shows tasks by `description`. If a task fails, waiting tasks are cancelled.

        Raises:
            Exception: the exception of the task.
        """
        call = ray.remote(_call).options(**self._options, name=f"{description}: {task.__name__}")
        references = [call.remote(task, self._shared, item) for item in items]
        numbers = {reference: number for number, reference in enumerate(references)}
        results: list[Any] = [None] * len(references)
        waiting = references
        with progress(description, sum(sizes)) as bar:
            try:
                while waiting:
                    ended, waiting = ray.wait(waiting, num_returns=1)
                    for reference in ended:
                        number = numbers[reference]
                        results[number] = ray.get(reference)
                        bar.advance(sizes[number])
            except RayTaskError as error:
                raise error.cause from error
            finally:
                for reference in waiting:
                    ray.cancel(reference, force=True)
        return iter(results)


def _call(task: Callable[[Recipe, Item], Result], recipe: Recipe, item: Item) -> Result:
    """Run a task on a worker."""
    load_plugins(recipe.plugins)
    if not storage.is_file(recipe.path(PROBE)):
        raise DataError(
            f"host {socket.gethostname()} does not see {recipe.resources.staging}: with engine=ray set data.path, or temp_dir, to a "
            "folder that all nodes share, or to s3://"
        )
    return run_task(task, recipe, item)


@contextmanager
def _connected(config: RayConfig) -> Iterator[None]:
    """Connect to the cluster. Raises ConfigError if no cluster answers."""
    set_token_mode()
    address = config.address or os.environ.get("RAY_ADDRESS") or "auto"
    if silent := _silent(address):
        raise ConfigError(_no_cluster(address, silent))
    try:
        context = ray.init(address=address, logging_level="warning", log_to_driver=True)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(_no_cluster(address, " ".join(str(error).split())[:300])) from error
    try:
        nodes = _join(config.min_nodes)
        dashboard = f", dashboard http://{context.dashboard_url}" if context.dashboard_url else ""
        logger.info("Ray %s: %d nodes, %g CPUs%s", ray.__version__, len(nodes), _total(nodes, "CPU"), dashboard)
        yield
    finally:
        ray.shutdown()


def _join(min_nodes: int) -> list[dict[str, Any]]:
    """Wait until `min_nodes` have joined, or for JOIN_S, and return the nodes of the cluster."""
    deadline = time.monotonic() + JOIN_S
    while len(nodes := _alive()) < min_nodes and time.monotonic() < deadline:
        time.sleep(0.2)
    if len(nodes) < min_nodes:
        logger.warning(
            "%d of %d Ray nodes joined within %d s: prepare starts with these, and later ones get tasks as they join",
            len(nodes),
            min_nodes,
            JOIN_S,
        )
    return nodes


def _alive() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _silent(address: str) -> str:
    """Return why nothing answers at a host and port; empty if something does.

    Ray itself tries for minutes, then aborts.
    """
    host, _, port = address.rpartition(":")
    if "://" in address or not port.isdigit():
        return ""
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _no_cluster(address: str, why: str) -> str:
    return (
        f"engine=ray: no Ray cluster at ray.address={address} ({why}); start one (ray start --head), let "
        "torchx run pipeline.prepare -j NODESx1 do it, or remove engine to use one machine"
    )


def _total(nodes: list[dict[str, Any]], resource: str) -> float:
    return float(sum(node["Resources"].get(resource, 0) for node in nodes))


def _check_tasks_fit(cpus: int, memory_bytes: int) -> None:
    """Raise ConfigError if a task fits no node, because Ray would wait forever."""
    nodes = [node["Resources"] for node in _alive()]
    fitting = [min(each.get("CPU", 0) // cpus, each.get("memory", 0) // memory_bytes) for each in nodes]
    if not any(fitting):
        largest: dict[str, float] = max(nodes, key=lambda each: each.get("memory", 0), default={})
        raise ConfigError(
            f"a task needs threads={cpus} and memory_limit_gb={memory_bytes / 2**30:g}, but the "
            f"largest of {len(nodes)} Ray "
            f"nodes offers {largest.get('CPU', 0):g} CPUs and {largest.get('memory', 0) / 2**30:.1f} GB: lower them, or start "
            "nodes with more (ray start --num-cpus, --memory)"
        )
