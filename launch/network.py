"""Choose the network between ranks, by variables of NCCL and gloo, for Slurm and Kubernetes.

NCCL uses TCP if it finds no faster network, and reports it only in its log. With NCCL_NET the job
fails instead. Sources: docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html;
github.com/aws/aws-ofi-nccl
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Optional

from launch.options import option
from pipeline.runtime.errors import LaunchError, check_choice

NCCL_SETTINGS = {
    "infiniband": {"NCCL_NET": "IB"},
    "roce": {"NCCL_NET": "IB"},
    "efa": {"NCCL_NET": "AWS Libfabric", "FI_PROVIDER": "efa"},
    "tcp": {"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1"},
}


@dataclass(frozen=True)
class NetworkOptions:
    network: Optional[str] = option(
        None, "network that NCCL must use, otherwise the job fails: infiniband, roce, efa or tcp"
    )
    interface: Optional[str] = option(None, "network interface that ranks use to connect, for "
                                            "instance ib0 or eth0")  # fmt: skip
    hca: Optional[str] = option(None, "InfiniBand or RoCE adapters that NCCL may use, for instance mlx5 or =mlx5_0:1")

    def __post_init__(self) -> None:
        if self.network is not None:
            check_choice("--network", self.network, NCCL_SETTINGS)
        for flag, value in (("--interface", self.interface), ("--hca", self.hca)):
            if value is not None and not re.fullmatch(r"[\^=]{0,2}[\w.:,-]+", value):
                raise LaunchError(f"{flag} {value}: give names separated by commas, for instance ib0 or mlx5_0")
        if self.hca and self.network not in ("infiniband", "roce"):
            raise LaunchError(
                f"--hca {self.hca}: give --network infiniband or roce too, because other networks have no adapters"
            )

    @property
    def network_env(self) -> dict[str, str]:
        env = dict(NCCL_SETTINGS.get(self.network or "", {}))
        if self.interface:
            env["NCCL_SOCKET_IFNAME"] = self.interface
            if self.interface[0] not in "^=":  # gloo does not support these
                env["GLOO_SOCKET_IFNAME"] = self.interface
        return {**env, "NCCL_IB_HCA": self.hca} if self.hca else env

    @property
    def locks_memory(self) -> bool:
        """Return whether the network accesses memory directly, so that locking memory must be
        allowed.
        """
        return self.network in ("infiniband", "roce", "efa")
