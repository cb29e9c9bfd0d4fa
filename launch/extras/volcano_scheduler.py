"""Implement TorchX's scheduler `kubernetes` (an entry point) for our Volcano Job.

It submits what `python -m launch.render kubernetes --kind volcano` prints. Other components are
submitted as TorchX does it. docs/adr/0012 explains why.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Optional

from torchx.schedulers.api import AppDryRunInfo, DescribeAppResponse, ListAppResponse
from torchx.schedulers.ids import make_unique
from torchx.schedulers.kubernetes_scheduler import JOB_STATE, KubernetesJob
from torchx.schedulers.kubernetes_scheduler import KubernetesScheduler as TorchXKubernetesScheduler
from torchx.specs import AppDef, AppState, Role, runopts
from torchx.util.strings import normalize_str

from launch.appdef import WORKLOAD
from launch.extras.operators import longest_name, volcano_job
from launch.kubernetes_options import KubernetesOptions
from launch.manifest import to_yaml
from launch.workload import Workload, check_env
from pipeline.runtime.errors import LaunchError

DEFAULT_QUEUE = "default"
UNIQUE = 12  # random characters after a name
NOT_HERE = ("kind", "workdir", "node_selector", "toleration", "label", "secret_mount", "deadline_s", "attempt", "owner")
NOT_FOUND = 404


class VolcanoRequest(KubernetesJob):
    """A manifest that prints itself as launch.render writes it."""

    def __str__(self) -> str:
        return to_yaml([self.resource])


class KubernetesScheduler(TorchXKubernetesScheduler):
    _client: Any

    def _run_opts(self) -> runopts:
        opts = super()._run_opts()
        opts.add("queue", type_=str, default=DEFAULT_QUEUE, help="Volcano queue to schedule job in")
        known = dict(opts)
        for each in dataclasses.fields(KubernetesOptions):
            if each.name not in known and each.name not in NOT_HERE:
                kind = bool if each.type == "bool" else int if "int" in str(each.type) else str
                opts.add(each.name, type_=kind, default=None, help=each.metadata["help"])
        return opts

    def build_workspace_and_update_role(self, role: Role, workspace: str, cfg: Any) -> None:
        """Add the working folder to the image, but only to an image that can be pushed.

        TorchX asks the docker daemon for every run, even for --dryrun.
        """
        if cfg.get("image_repo") or WORKLOAD not in role.metadata:
            super().build_workspace_and_update_role(role, workspace, cfg)

    def _submit_dryrun(self, app: AppDef, cfg: Any) -> AppDryRunInfo[Any]:
        (role, *_) = app.roles
        workload: Optional[Workload] = role.metadata.get(WORKLOAD)
        if workload is None:
            return super()._submit_dryrun(app, cfg)
        check_env(role.env)
        # renames a local image to the name under which it is pushed
        pushed = self.dryrun_push_images(app, cfg)
        room = longest_name(workload.verb, workload.nodes) - UNIQUE - 1
        name = normalize_str(make_unique(workload.name[:room].rstrip("-"), UNIQUE))
        image = workload.image and role.image
        options = {
            each.name: cfg[each.name]
            for each in dataclasses.fields(KubernetesOptions)
            if each.name not in NOT_HERE and cfg.get(each.name) is not None
        }
        resource = volcano_job(
            dataclasses.replace(workload, name=name, image=image), KubernetesOptions(kind="volcano", **options)
        )
        return AppDryRunInfo(VolcanoRequest(pushed, resource), str)

    def _api_client(self) -> Any:
        """Return a client of the cluster. Raises LaunchError if there is no cluster; TorchX would use localhost."""
        if self._client is None:
            from kubernetes import client, config

            try:
                config.load_kube_config()
            except config.ConfigException as error:
                try:
                    config.load_incluster_config()
                except config.ConfigException:
                    raise LaunchError(
                        f"no cluster is configured: {str(error).rstrip('.')}; set KUBECONFIG, or print a manifest: "
                        "python -m launch.render kubernetes --kind volcano"
                    ) from None
            self._client = client.ApiClient()
        return self._client

    def describe(self, app_id: str) -> Optional[DescribeAppResponse]:
        """Return the state of the job, or None if the cluster does not know the job."""
        from kubernetes.client.rest import ApiException

        if ":" not in app_id:
            return None
        try:
            return super().describe(app_id)
        except ApiException as error:
            if error.status == NOT_FOUND:
                return None
            raise

    def list(self, *args: Any, **kwargs: Any) -> "list[ListAppResponse]":
        api = self._custom_objects_api()
        namespace = _own_namespace()
        found = api.list_namespaced_custom_object(
            group="batch.volcano.sh", version="v1alpha1", namespace=namespace, plural="jobs", timeout_seconds=30
        )
        phases = [each.get("status", {}).get("state", {}).get("phase") for each in found["items"]]  # None: not seen yet
        return [
            ListAppResponse(f"{namespace}:{each['metadata']['name']}", JOB_STATE.get(phase, AppState.UNKNOWN))
            for each, phase in zip(found["items"], phases, strict=True)
        ]


def _own_namespace() -> str:
    """Return the namespace that kubectl uses."""
    from kubernetes import config

    try:
        _, context = config.list_kube_config_contexts()
    except config.ConfigException:  # inside a pod
        return "default"
    return str(context["context"].get("namespace", "default"))


def create_scheduler(
    session_name: str, client: Any = None, docker_client: Any = None, **kwargs: Any
) -> KubernetesScheduler:
    return KubernetesScheduler(session_name=session_name, client=client, docker_client=docker_client)
