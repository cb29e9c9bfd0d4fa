"""W&B: a run of the project `logger.project`.

WANDB_MODE=offline writes only into the run folder.
"""

from __future__ import annotations

from pipeline.config.registry import register
from pipeline.config.saved_jobs import flat
from pipeline.extras.monitoring.trackers.tracker import Tracker


@register("tracker", "wandb")
class WandbTracker(Tracker):
    requires = "wandb"
    install = "torchrec-pipeline[wandb]"

    def begin(self) -> None:
        import wandb

        job = self.job
        self._run = wandb.init(
            project=self.project, name=job.name, id=self.begun_run("wandb") or None, resume="allow",
            dir=job.run_dir, config=flat(job), settings=wandb.Settings(silent=True, console="off"),
        )  # fmt: skip
        self.remember_run("wandb", self._run.id)

    def write(self, kind: str, step: int, values: dict[str, float]) -> None:
        self._run.log({f"{kind}/{name}": value for name, value in values.items()} | {"step": step})

    def end(self) -> None:
        self._run.finish()
