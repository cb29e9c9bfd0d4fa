"""Define the components of `torchx run -s <scheduler> pipeline.<verb> -j NODESxRANKS -- key=value`.

TorchX treats every function of this module as a component and looks for its name in this file.
launch.appdef adds the parameters and the body.
"""

from typing import Any

from torchx import specs

from launch import appdef


@appdef.component("j", "gpu", "max_retries", "max_restarts", "check_data", j="1x2")
def train(*overrides: str, **where: Any) -> specs.AppDef:
    """Train: torchx run -s local_cwd pipeline.train -j 1x2 -- experiment=quickstart"""


@appdef.component("j", "gpu", "max_restarts", "check_data", j="1x2", max_restarts=1)
def evaluate(*overrides: str, **where: Any) -> specs.AppDef:
    """Evaluate: torchx run -s local_cwd pipeline.evaluate -j 1x2 -- run=runs/quickstart split=test"""


@appdef.component("j", "max_retries")
def prepare(*overrides: str, **where: Any) -> specs.AppDef:
    """Prepare: torchx run -s local_cwd pipeline.prepare -- data=criteo_kaggle source=train.txt"""


@appdef.component("gpu", "check_data")
def plan(*overrides: str, **where: Any) -> specs.AppDef:
    """Plan: torchx run -s local_cwd pipeline.plan -- experiment=quickstart world_size=2"""


@appdef.component("max_retries", "check_data")
def export(*overrides: str, **where: Any) -> specs.AppDef:
    """Export: torchx run -s local_cwd pipeline.export -- run=runs/quickstart precision=int8"""


@appdef.component("j", "gpu", "max_retries", "max_restarts", "check_data")
def retrain(*overrides: str, **where: Any) -> specs.AppDef:
    """Retrain: torchx run -s local_cwd pipeline.retrain -- experiment=quickstart source=clicks/"""


@appdef.component("j", "gpu", verb="check_nodes", j="2x1", max_restarts=0)
def doctor(*overrides: str, **where: Any) -> specs.AppDef:
    """Check a job's nodes before a long run: torchx run -s slurm pipeline.doctor -j 2x1 --gpu 8 -- folder=/shared/runs"""


@appdef.component("gpu", "max_retries")
def predict(*overrides: str, **where: Any) -> specs.AppDef:
    """Score files: torchx run -s slurm pipeline.predict -- artifact=... source=rows/ output=scores.parquet num_shards=8"""


@appdef.component("gpu", "max_retries")
def serve(*overrides: str, **where: Any) -> specs.AppDef:
    """Serve an artifact until cancelled: torchx run -s slurm pipeline.serve -- artifact=artifacts/quickstart"""
