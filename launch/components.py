"""Components of `torchx run -s <scheduler> pipeline.<verb> -j NODESxRANKS -- key=value ...`; each job composes before it is submitted.

TorchX takes every function of this module for a component, and reads types and help from its source: only
Optional[...] of plain types is understood (0.7.0 fails every call, of any component, on `str | None`).
"""

from typing import Dict, Optional

from torchx import specs

from launch import appdef, workload


# TorchX reads a component's options from its signature: each is a parameter.
def train(
    *overrides: str,
    j: str = "1x2",
    cpu: Optional[int] = None,
    gpu: Optional[int] = None,
    memMB: Optional[int] = None,
    h: Optional[str] = None,
    env: Optional[Dict[str, str]] = None,
    image: Optional[str] = None,
    mount: Optional[str] = None,
    name: Optional[str] = None,
    max_retries: int = 0,
    max_restarts: int = 3,
    check_data: bool = True,
) -> specs.AppDef:
    """Train: torchx run -s local_cwd pipeline.train -j 1x2 -- experiment=quickstart

    Args:
        overrides: the job, as for `python -m pipeline.train`; `-- --help` lists the choices
        j: {nodes}x{ranks per node}
        cpu: cores a node; this machine's, or the cluster's default, unless given
        gpu: GPUs a node
        memMB: memory a node; this machine's unless given
        h: a named TorchX resource instead of cpu, gpu and memMB
        env: environment of the job (A=1,B=2)
        image: container image; without one the job runs in this Python environment
        mount: type=bind,src=/data,dst=/data,readonly (or type=volume, type=device), several after one another
        name: name of the TorchX app; the job's name unless given
        max_retries: how often the scheduler may start the job again; it resumes from its newest checkpoint
        max_restarts: how often the ranks are started again on their hosts after one of them dies or hangs
        check_data: read dataset.json here and validate the job against it; False where this machine cannot see it
    """
    where = workload.Where(j, cpu, gpu, memMB, h, env, image, mount, name, max_retries, max_restarts)
    doc = appdef.without_args(train.__doc__)
    return appdef.app_of(workload.make_workload("train", doc, overrides, where, check_data))


# TorchX reads a component's options from its signature: each is a parameter.
def evaluate(
    *overrides: str,
    j: str = "1x2",
    cpu: Optional[int] = None,
    gpu: Optional[int] = None,
    memMB: Optional[int] = None,
    h: Optional[str] = None,
    env: Optional[Dict[str, str]] = None,
    image: Optional[str] = None,
    mount: Optional[str] = None,
    name: Optional[str] = None,
    max_restarts: int = 1,
    check_data: bool = True,
) -> specs.AppDef:
    """Evaluate: torchx run -s local_cwd pipeline.evaluate -j 1x2 -- run=runs/quickstart split=test

    Args:
        overrides: run=<run folder> and what `python -m pipeline.evaluate --help` lists
        j: {nodes}x{ranks per node}
        cpu: cores a node; this machine's, or the cluster's default, unless given
        gpu: GPUs a node
        memMB: memory a node; this machine's unless given
        h: a named TorchX resource instead of cpu, gpu and memMB
        env: environment of the job (A=1,B=2)
        image: container image; without one the job runs in this Python environment
        mount: type=bind,src=/data,dst=/data,readonly (or type=volume, type=device), several after one another
        name: name of the TorchX app
        check_data: look into the run folder here; False where this machine cannot see it
    """
    where = workload.Where(j, cpu, gpu, memMB, h, env, image, mount, name, max_restarts=max_restarts)
    doc = appdef.without_args(evaluate.__doc__)
    return appdef.app_of(workload.make_workload("evaluate", doc, overrides, where, check_data))


def prepare(
    *overrides: str,
    j: str = "1x1",
    cpu: Optional[int] = None,
    memMB: Optional[int] = None,
    h: Optional[str] = None,
    env: Optional[Dict[str, str]] = None,
    image: Optional[str] = None,
    mount: Optional[str] = None,
    name: Optional[str] = None,
    max_retries: int = 0,
) -> specs.AppDef:
    """Prepare a data set: torchx run -s local_cwd pipeline.prepare -- data=criteo_kaggle source=train.txt

    Args:
        overrides: data=<option> source=<file, folder or glob> and what `python -m pipeline.prepare --help` lists
        j: {nodes}x1, with engine=ray for more than one: a Ray cluster that lasts as long as the job
        cpu: cores a node; this machine's unless given
        memMB: memory a node; this machine's unless given
        h: a named TorchX resource instead of cpu and memMB
        env: environment of the job (A=1,B=2)
        image: container image; without one the job runs in this Python environment
        mount: type=bind,src=/data,dst=/data,readonly (or type=volume, type=device), several after one another
        name: name of the TorchX app
        max_retries: how often the scheduler may start the job again; files that are done stay done
    """
    where = workload.Where(j, cpu, None, memMB, h, env, image, mount, name, max_retries)
    doc = appdef.without_args(prepare.__doc__)
    return appdef.app_of(workload.make_workload("prepare", doc, overrides, where))


def plan(
    *overrides: str,
    cpu: Optional[int] = None,
    gpu: Optional[int] = None,
    memMB: Optional[int] = None,
    h: Optional[str] = None,
    env: Optional[Dict[str, str]] = None,
    image: Optional[str] = None,
    mount: Optional[str] = None,
    name: Optional[str] = None,
    check_data: bool = True,
) -> specs.AppDef:
    """Plan how tables are sharded: torchx run -s local_cwd pipeline.plan -- experiment=quickstart world_size=2

    Args:
        overrides: the train job and world_size=<ranks>
        cpu: cores; this machine's, or the cluster's default, unless given
        gpu: GPUs, where hardware=auto is to probe one
        memMB: memory; this machine's unless given
        h: a named TorchX resource instead of cpu, gpu and memMB
        env: environment of the job (A=1,B=2)
        image: container image; without one the job runs in this Python environment
        mount: type=bind,src=/data,dst=/data,readonly (or type=volume, type=device), several after one another
        name: name of the TorchX app
        check_data: read dataset.json here and validate the job against it; False where this machine cannot see it
    """
    where = workload.Where("1x1", cpu, gpu, memMB, h, env, image, mount, name)
    doc = appdef.without_args(plan.__doc__)
    return appdef.app_of(workload.make_workload("plan", doc, overrides, where, check_data))


def export(
    *overrides: str,
    cpu: Optional[int] = None,
    memMB: Optional[int] = None,
    h: Optional[str] = None,
    env: Optional[Dict[str, str]] = None,
    image: Optional[str] = None,
    mount: Optional[str] = None,
    name: Optional[str] = None,
    max_retries: int = 0,
    check_data: bool = True,
) -> specs.AppDef:
    """Export: torchx run -s local_cwd pipeline.export -- run=runs/quickstart precision=int8

    Args:
        overrides: run=<run folder> and what `python -m pipeline.export --help` lists
        cpu: cores; this machine's, or the cluster's default, unless given
        memMB: memory; this machine's unless given
        h: a named TorchX resource instead of cpu and memMB
        env: environment of the job (A=1,B=2)
        image: container image; without one the job runs in this Python environment
        mount: type=bind,src=/data,dst=/data,readonly (or type=volume, type=device), several after one another
        name: name of the TorchX app
        max_retries: how often the scheduler may start the job again
        check_data: look into the run folder here; False where this machine cannot see it
    """
    where = workload.Where("1x1", cpu, None, memMB, h, env, image, mount, name, max_retries)
    doc = appdef.without_args(export.__doc__)
    return appdef.app_of(workload.make_workload("export", doc, overrides, where, check_data))


# TorchX reads a component's options from its signature: each is a parameter.
def retrain(
    *overrides: str,
    j: str = "1x1",
    cpu: Optional[int] = None,
    gpu: Optional[int] = None,
    memMB: Optional[int] = None,
    h: Optional[str] = None,
    env: Optional[Dict[str, str]] = None,
    image: Optional[str] = None,
    mount: Optional[str] = None,
    name: Optional[str] = None,
    max_retries: int = 0,
    max_restarts: int = 3,
    check_data: bool = True,
) -> specs.AppDef:
    """Retrain, one tick: torchx run -s local_cwd pipeline.retrain -- experiment=quickstart source=clicks/

    Args:
        overrides: the train job, source=<folder> and what `python -m pipeline.retrain --help` lists
        j: {nodes}x{ranks per node}
        cpu: cores a node; this machine's, or the cluster's default, unless given
        gpu: GPUs a node
        memMB: memory a node; this machine's unless given
        h: a named TorchX resource instead of cpu, gpu and memMB
        env: environment of the job (A=1,B=2)
        image: container image; without one the job runs in this Python environment
        mount: type=bind,src=/data,dst=/data,readonly (or type=volume, type=device), several after one another
        name: name of the TorchX app
        max_retries: how often the scheduler may start the job again; a tick that was cut short is finished by the next
        max_restarts: how often the ranks are started again on their hosts after one of them dies or hangs
        check_data: validate the job against what it reads; False where this machine cannot see it
    """
    where = workload.Where(j, cpu, gpu, memMB, h, env, image, mount, name, max_retries, max_restarts)
    doc = appdef.without_args(retrain.__doc__)
    return appdef.app_of(workload.make_workload("retrain", doc, overrides, where, check_data))


# TorchX reads a component's options from its signature: each is a parameter.
def doctor(
    *overrides: str,
    j: str = "2x1",
    cpu: Optional[int] = None,
    gpu: Optional[int] = None,
    memMB: Optional[int] = None,
    h: Optional[str] = None,
    env: Optional[Dict[str, str]] = None,
    image: Optional[str] = None,
    mount: Optional[str] = None,
    name: Optional[str] = None,
) -> specs.AppDef:
    """Check a job's nodes before a long run: torchx run -s slurm pipeline.doctor -j 2x1 -- folder=/shared/runs

    Args:
        overrides: what `python -m pipeline.check_nodes --help` lists
        j: {nodes}x{ranks per node}; one rank a node is enough
        cpu: cores a node; this machine's, or the cluster's default, unless given
        gpu: GPUs a node
        memMB: memory a node; this machine's unless given
        h: a named TorchX resource instead of cpu, gpu and memMB
        env: environment of the job (A=1,B=2)
        image: container image; without one the job runs in this Python environment
        mount: type=bind,src=/data,dst=/data,readonly (or type=volume, type=device), several after one another
        name: name of the TorchX app
    """
    where = workload.Where(j, cpu, gpu, memMB, h, env, image, mount, name, max_restarts=0)
    doc = appdef.without_args(doctor.__doc__)
    return appdef.app_of(workload.make_workload("check_nodes", doc, overrides, where))


def predict(
    *overrides: str,
    cpu: Optional[int] = None,
    gpu: Optional[int] = None,
    memMB: Optional[int] = None,
    h: Optional[str] = None,
    env: Optional[Dict[str, str]] = None,
    image: Optional[str] = None,
    mount: Optional[str] = None,
    name: Optional[str] = None,
    max_retries: int = 0,
) -> specs.AppDef:
    """Score files: torchx run -s slurm pipeline.predict -- artifact=... source=rows/ output=scores.parquet num_shards=8

    Args:
        overrides: artifact=, source=, output= and what `python -m pipeline.predict --help` lists; num_shards=N starts N tasks
        cpu: cores a task; this machine's, or the cluster's default, unless given
        gpu: GPUs a task
        memMB: memory a task; this machine's unless given
        h: a named TorchX resource instead of cpu, gpu and memMB
        env: environment of the job (A=1,B=2)
        image: container image; without one the job runs in this Python environment
        mount: type=bind,src=/data,dst=/data,readonly (or type=volume, type=device), several after one another
        name: name of the TorchX app
        max_retries: how often the scheduler may start a task again; parts that are scored stay so
    """
    where = workload.Where("1x1", cpu, gpu, memMB, h, env, image, mount, name, max_retries)
    doc = appdef.without_args(predict.__doc__)
    return appdef.app_of(workload.make_workload("predict", doc, overrides, where))


def serve(
    *overrides: str,
    cpu: Optional[int] = None,
    gpu: Optional[int] = None,
    memMB: Optional[int] = None,
    h: Optional[str] = None,
    env: Optional[Dict[str, str]] = None,
    image: Optional[str] = None,
    mount: Optional[str] = None,
    name: Optional[str] = None,
    max_retries: int = 0,
) -> specs.AppDef:
    """Serve an artifact until cancelled: torchx run -s slurm pipeline.serve -- artifact=artifacts/quickstart

    Args:
        overrides: artifact=<folder, link or registry> and what `python -m pipeline.serve --help` lists
        cpu: cores; this machine's, or the cluster's default, unless given
        gpu: GPUs
        memMB: memory; this machine's unless given
        h: a named TorchX resource instead of cpu, gpu and memMB
        env: environment of the job (A=1,B=2)
        image: container image; without one the job runs in this Python environment
        mount: type=bind,src=/data,dst=/data,readonly (or type=volume, type=device), several after one another
        name: name of the TorchX app
        max_retries: how often the scheduler may start the server again
    """
    where = workload.Where("1x1", cpu, gpu, memMB, h, env, image, mount, name, max_retries)
    doc = appdef.without_args(serve.__doc__)
    return appdef.app_of(workload.make_workload("serve", doc, overrides, where))
