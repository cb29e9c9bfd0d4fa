"""Average the tables of the hosts every few steps, and log how long it took."""

from __future__ import annotations

from pipeline.config.registry import register
from pipeline.extras.embedding_sync.replicas import TableReplicas
from pipeline.runtime.logs import get_logger
from pipeline.training.hooks.base import Hook, TrainingState

logger = get_logger("pipeline.training")


@register("hook", "replicas")
class AverageReplicas(Hook):
    """Average the tables of the hosts. Do nothing if tables are sharded over all ranks."""

    runs_after = "record"  # tables are averaged before another hook reads them

    @property
    def _replicas(self) -> TableReplicas | None:
        replicas = self.parts.replicas
        assert replicas is None or isinstance(replicas, TableReplicas)
        return replicas

    def on_step_start(self, state: TrainingState) -> None:
        if self._replicas:
            self._replicas.equal = False

    def on_step_end(self, state: TrainingState) -> None:
        if self._replicas:
            self._replicas.after_step(state.step)

    def log_values(self, state: TrainingState) -> dict[str, float]:
        """Return values since the last log line: how often tables were averaged, and the bytes sent for it."""
        replicas = self._replicas
        if replicas is None:
            return {}
        values = replicas.report()
        if values["embedding_syncs"]:
            logger.info(
                "step %d  tables averaged %d time(s) over %d hosts, %.1f MiB on the wire a rank, %.2f s",
                state.step,
                values["embedding_syncs"],
                replicas.num_hosts,
                values["embedding_sync_bytes"] / 2**20,
                values["embedding_sync_s"],
            )
        return values
