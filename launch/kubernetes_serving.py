"""Render a server for Kubernetes: Deployment, Service, disruption budget, autoscaler, ServiceMonitor.

The pods follow the artifact's link or the registry's champion, so a promotion needs no rollout. If
the image or the command changes, a pod stops only when its successor is ready.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from launch.kubernetes_options import KubernetesOptions
from launch.kubernetes_pod import INSTANCE, metadata, pod_template, warning_lines
from launch.manifest import of_kind, patched, to_yaml
from launch.options import option
from launch.workload import Workload
from pipeline.runtime.errors import LaunchError, check_at_least, check_within

# the name in launch/monitoring/prometheus_adapter.yml
LATENCY = "pipeline_serving_request_p95_seconds"


@dataclass(frozen=True)
class ServingOptions(KubernetesOptions):
    replicas: int = option(2, "number of pods; with autoscaling, the minimum")
    max_replicas: int = option(0, "maximum number of pods with autoscaling; 0: no autoscaling")
    cpu_percent: int = option(60, "target share of the requested cores for autoscaling; latency grows above it")
    latency_ms: int = option(0, "target of the 95th percentile of a request for autoscaling; see docs/do/cluster.md")
    monitor: bool = option(False, "add a ServiceMonitor, with which Prometheus' operator finds the metrics")
    scrape_s: int = option(15, "seconds between two reads of the metrics")
    service_port: int = option(80, "port of the Service")
    load_s: int = option(600, "seconds that a pod may take to load the artifact")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("replicas", "load_s", "scrape_s"):
            check_at_least(f"--{name.replace('_', '-')}", getattr(self, name), 1)
        check_within("--service-port", self.service_port, 1, 65535)
        check_within("--cpu-percent", self.cpu_percent, 1, 100)
        check_at_least("--latency-ms", self.latency_ms, 0)
        if self.latency_ms and not self.max_replicas:
            raise LaunchError(f"--latency-ms {self.latency_ms} is for autoscaling: give --max-replicas too")
        if self.max_replicas and self.max_replicas < self.replicas:
            raise LaunchError(
                f"--max-replicas {self.max_replicas} is less than --replicas {self.replicas}: raise it, or remove it"
            )
        if self.attempt or self.owner:
            raise LaunchError("the name of a server does not change: remove --attempt and --owner")
        if self.kind != "job" or self.queue:
            raise LaunchError("a server is a Deployment, which uses no queue: remove --kind and --queue")


def render_serving(workload: Workload, options: ServingOptions) -> str:
    """Return YAML for `kubectl apply -f -`. Raises LaunchError."""
    comment = f"{workload.verb}: {options.replicas} pods behind {workload.name}:{options.service_port}; it authenticates nobody."
    comment = "\n".join([comment, *warning_lines(workload, options)])
    return to_yaml(patched(serving_objects(workload, options), options.patch), comment)


def serving_objects(workload: Workload, options: ServingOptions) -> list[dict[str, Any]]:
    """Return all Kubernetes objects of the server. The Deployment is the first."""
    about, selected = metadata(workload, options), {"matchLabels": {INSTANCE: workload.name}}
    port = {"name": "http", "port": options.service_port, "targetPort": "http"}
    service = {"selector": {INSTANCE: workload.name}, "ports": [port]}
    objects = [_deployment(workload, options), of_kind("v1", "Service", about, service)]
    if options.replicas > 1:  # the draining of nodes stops one pod at a time
        budget = {"maxUnavailable": 1, "selector": selected}
        objects.append(of_kind("policy/v1", "PodDisruptionBudget", about, budget))
    if options.max_replicas:
        objects.append(_autoscaler(workload, options))
    if options.monitor:
        endpoint = {"port": "http", "path": "/metrics", "interval": f"{options.scrape_s}s"}
        monitor = {"selector": selected, "endpoints": [endpoint]}
        objects.append(of_kind("monitoring.coreos.com/v1", "ServiceMonitor", about, monitor))
    return objects


def _deployment(workload: Workload, options: ServingOptions) -> dict[str, Any]:
    spec = {
        # otherwise each apply would undo autoscaling
        **({} if options.max_replicas else {"replicas": options.replicas}),
        "selector": {"matchLabels": {INSTANCE: workload.name}},
        "progressDeadlineSeconds": options.load_s + 60,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "template": _pod(workload, options),
    }
    return of_kind("apps/v1", "Deployment", metadata(workload, options), spec)


def _pod(workload: Workload, options: ServingOptions) -> dict[str, Any]:
    template = pod_template(workload, options, "localhost")
    pod = template["spec"]
    pod["restartPolicy"] = "Always"  # a Deployment supports no other policy
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {INSTANCE: workload.name}},
    }
    pod["topologySpreadConstraints"] = [spread]
    (container,) = pod["containers"]
    container["ports"] = [{"name": "http", "containerPort": workload.http_port}]
    period_s = 5
    container["startupProbe"] = _probe("/health/ready", period_s, failures=-(-options.load_s // period_s))
    container["readinessProbe"] = _probe("/health/ready", period_s, failures=2)
    container["livenessProbe"] = _probe("/health/live", 10, failures=6)
    scraped = {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(workload.http_port),
        "prometheus.io/path": "/metrics",
    }
    if not options.monitor:  # otherwise a Prometheus that reads both would count it twice
        template["metadata"]["annotations"] = {**scraped, **(options.annotation or {})}
    return template


def _probe(path: str, period_s: int, failures: int) -> dict[str, Any]:
    asked = {"httpGet": {"path": path, "port": "http"}, "periodSeconds": period_s}
    return {**asked, "timeoutSeconds": 3, "failureThreshold": failures}


def _autoscaler(workload: Workload, options: ServingOptions) -> dict[str, Any]:
    """Return an autoscaler that scales by used cores, and by latency if set; the larger number of pods counts."""
    target = {"type": "Utilization", "averageUtilization": options.cpu_percent}
    metrics: list[dict[str, Any]] = [{"type": "Resource", "resource": {"name": "cpu", "target": target}}]
    if options.latency_ms:
        # thousandths of a second
        average = {"type": "AverageValue", "averageValue": f"{options.latency_ms}m"}
        metrics.append({"type": "Pods", "pods": {"metric": {"name": LATENCY}, "target": average}})
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": workload.name},
        "minReplicas": options.replicas,
        "maxReplicas": options.max_replicas,
        "metrics": metrics,
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 300}},
    }
    return of_kind("autoscaling/v2", "HorizontalPodAutoscaler", metadata(workload, options), spec)
