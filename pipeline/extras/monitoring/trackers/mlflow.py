"""MLflow: a run of the experiment `logger.project` at `logger.tracker_uri`."""

from __future__ import annotations

from pipeline.config.registry import register
from pipeline.config.saved_jobs import flat
from pipeline.extras.monitoring.trackers.tracker import Tracker

MAX_PARAMETER_CHARACTERS = 500  # limit of MLflow


@register("tracker", "mlflow")
class MlflowTracker(Tracker):
    requires = "mlflow"
    install = "torchrec-pipeline[mlflow]"

    def begin(self) -> None:
        from mlflow.tracking import MlflowClient

        job = self.job
        self._client = MlflowClient(tracking_uri=job.logger.tracker_uri)
        if begun := self.begun_run("mlflow"):
            self._id = begun
            return
        found = self._client.get_experiment_by_name(self.project)
        number = found.experiment_id if found else self._client.create_experiment(self.project)
        self._id = self._client.create_run(number, run_name=job.name, tags={"run_dir": job.run_dir}).info.run_id
        for key, value in flat(job).items():
            self._client.log_param(self._id, key.replace("*", "_all"), str(value)[:MAX_PARAMETER_CHARACTERS])
        self.remember_run("mlflow", self._id)

    def write(self, kind: str, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self._client.log_metric(self._id, f"{kind}/{name}", float(value), step=step)

    def end(self) -> None:
        self._client.set_terminated(self._id)
