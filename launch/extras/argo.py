"""Render a chain as a Workflow of Argo. A stage is a pod, a JobSet (several nodes) or a Deployment (a server)."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from launch.kubernetes import render_jobset
from launch.kubernetes_options import KubernetesOptions
from launch.kubernetes_pod import STAYS_SO, labels_of, pod_template
from launch.kubernetes_serving import ServingOptions, serving_objects
from launch.manifest import given, to_yaml
from launch.targets import Target, register
from launch.workload import Stage, check_one_task
from pipeline.runtime.errors import LaunchError

THIS_RUN = "this-run-of-the-chain"  # replaced by the workflow's name when the text is complete
# Fields of a pod that a template of Argo has under the same name. Other fields are set by its
# podSpecPatch.
OF_TEMPLATE = ("volumes", "securityContext", "nodeSelector", "tolerations", "affinity", "priorityClassName")
NOT_OF_A_STEP = (
    "restartPolicy",
    "containers",
    "automountServiceAccountToken",
    "imagePullSecrets",
    "serviceAccountName",
    "subdomain",
)


def render_workflow(name: str, stages: list[Stage], options: KubernetesOptions) -> str:
    """Return YAML for `kubectl create -f -`. Raises LaunchError."""
    if options.kind != "job" or options.attempt or options.owner or options.patch:
        raise LaunchError("a Workflow has one template per stage; remove --kind, --attempt, --owner and --patch")
    templates: list[dict[str, Any]] = []
    tasks: list[dict[str, Any]] = []
    for stage in stages:
        check_one_task(stage.workload, "a pod of a Workflow")
        if wrong := [word for word in [*stage.workload.command, *stage.workload.env.values()] if "{{" in word]:
            raise LaunchError(
                f"stages.{stage.name}: {wrong[0]!r} has {{{{, which Argo reads as a variable; put a blank between the "
                "braces"
            )
        for template in _templates(stage, options):
            templates.append(template)
            tasks.append(given(name=template["name"], template=template["name"], dependencies=list(stage.after)))
    spec = given(
        entrypoint="chain",
        serviceAccountName=options.service_account,
        imagePullSecrets=[{"name": options.pull_secret}] if options.pull_secret else [],
        ttlStrategy={"secondsAfterCompletion": options.keep_s},
        templates=[{"name": "chain", "dag": {"tasks": tasks}}, *templates],
    )
    metadata = given(generateName=f"{name}-", namespace=options.namespace, labels=options.label)
    workflow = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "metadata": metadata, "spec": spec}
    comment = f"{name}: {' -> '.join(stage.name for stage in stages)}. Its service account may create JobSets and Deployments."
    return to_yaml([workflow], comment).replace(THIS_RUN, "{{workflow.name}}")


def _templates(stage: Stage, options: KubernetesOptions) -> list[dict[str, Any]]:
    if stage.is_service:
        kept = {name: getattr(options, name) for name in options.__dataclass_fields__}
        objects = serving_objects(stage.workload, ServingOptions(**{**kept, "queue": None}))
        names = [stage.name, *(f"{stage.name}-{each['kind'].lower()}" for each in objects[1:])]
        return [_resource(name, "apply", each) for name, each in zip(names, objects, strict=True)]
    if stage.workload.nodes > 1:
        named = replace(stage.workload, name=f"{THIS_RUN}-{stage.name}")
        (jobset,) = render_jobset(named, replace(options, kind="jobset"))
        ends = {
            "successCondition": "status.terminalState == Completed",
            "failureCondition": "status.terminalState == Failed",
        }
        return [_resource(stage.name, "create", jobset, setOwnerReference=True, **ends)]
    return [_step(stage, options)]


def _resource(name: str, action: str, manifest: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": name, "resource": {"action": action, "manifest": to_yaml([manifest]), **more}}


def _step(stage: Stage, options: KubernetesOptions) -> dict[str, Any]:
    workload = stage.workload
    pod = pod_template(workload, options, "localhost")["spec"]
    (container,) = pod["containers"]
    rest = {key: value for key, value in pod.items() if key not in (*OF_TEMPLATE, *NOT_OF_A_STEP)}
    retry = None
    if workload.max_retries:
        stays_so = f"asInt(lastRetry.exitCode) not in {STAYS_SO}"  # a retry would end the same way
        retry = {"limit": workload.max_retries, "retryPolicy": "Always", "expression": stays_so}
    return given(
        name=stage.name,
        metadata=given(labels=labels_of(workload, options), annotations=options.annotation),
        activeDeadlineSeconds=options.deadline_s or None,
        retryStrategy=retry,
        container=container,
        **{key: pod[key] for key in OF_TEMPLATE if key in pod},
        podSpecPatch=json.dumps(rest) if rest else "",
    )


register("chain", "argo", Target(KubernetesOptions, render_workflow))
