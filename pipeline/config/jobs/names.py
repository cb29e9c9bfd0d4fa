"""The name of each job's verb and configuration (stdlib and OmegaConf only)."""

from __future__ import annotations

from pipeline.config.jobs.evaluate import EvaluateJob, ExportJob, PredictJob
from pipeline.config.jobs.machine import CheckNodesJob, InitJob
from pipeline.config.jobs.prepare import GenerateJob, InspectJob, PrepareJob
from pipeline.config.jobs.retrain import RegistryJob, RetrainJob
from pipeline.config.jobs.serve import ServeJob
from pipeline.config.jobs.train import PlanJob, TrainJob

# Job -> conf/<name>.yaml, and the verb.
CONFIG_NAMES: dict[type, str] = {
    GenerateJob: "generate", PrepareJob: "prepare", PlanJob: "plan", TrainJob: "train", EvaluateJob: "evaluate",
    ExportJob: "export",
    RetrainJob: "retrain", RegistryJob: "registry",
    PredictJob: "predict", ServeJob: "serve",
    InspectJob: "inspect", InitJob: "init", CheckNodesJob: "check_nodes",
}  # fmt: skip
