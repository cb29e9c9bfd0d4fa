"""Estimate the milliseconds of a collective from its bytes and links: the transfer, and the latency
of issuing it.

S is what a rank sends or receives, including its own part, as TorchRec counts it. There are W ranks
on H hosts of L ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.planner.hardware import BYTES_PER_MS, Hardware
from pipeline.planner.search.problem import Floats

# Each sharding type of a collection has separate collectives (torchrec/distributed/dist_data.py).
# The exchange of ids has three all-to-alls: of counts, of lengths, of ids. Order of the columns:
# plan_record.PHASES.
NUM_INPUT_ALL_TO_ALLS = 3


@dataclass(frozen=True)
class Links:
    """The network of one rank. Bandwidths in bytes/ms, latencies in ms."""

    world_size: int
    local_world_size: int
    intra: float
    inter: float
    launch_ms: float
    intra_hop_ms: float
    inter_hop_ms: float

    @property
    def num_hosts(self) -> int:
        return self.world_size // self.local_world_size

    def all_to_all_ms(self, num_bytes: Floats) -> Floats:
        """Return the time of an all-to-all: 1/W of S stays on the rank, (L-1)/W goes to its host,
        (W-L)/W to other hosts.

        The slower of both links counts, not their sum, because all sends start at once on links
        that share no wires.
        """
        world, local = self.world_size, self.local_world_size
        return np.maximum(
            num_bytes * (local - 1) / world / self.intra, num_bytes * (world - local) / world / self.inter
        )

    def ring_ms(self, num_bytes: Floats) -> Floats:
        """Return the time of a reduce-scatter or all-gather of S: a ring sends (W-1)/W of it
        through every rank.

        Each of a host's L ring channels leaves through another rank's port, so hosts are connected
        by L ports (NVIDIA/nccl-tests, doc/PERFORMANCE.md: the bus bandwidth is that of the slowest
        link of the ring).
        """
        joined = self.local_world_size * self.inter
        speed = self.intra if self.num_hosts == 1 else min(self.intra, joined) if self.local_world_size > 1 else joined
        return num_bytes * (self.world_size - 1) / self.world_size / speed

    def host_ring_ms(self, num_bytes: Floats) -> Floats:
        """Return the time of the same collective among the ranks of a host."""
        return num_bytes * (self.local_world_size - 1) / self.local_world_size / self.intra

    def across_hosts_ms(self, num_bytes: Floats) -> Floats:
        """Return the time of an all-to-all among ranks with equal positions on their hosts. 1/H
        stays.
        """
        return num_bytes * (self.num_hosts - 1) / self.num_hosts / self.inter

    def latencies_ms(self) -> dict[str, Floats]:
        """Return sharding type -> [phases of plan_record.PHASES]: the time of its collectives
        before the first byte.

        Counted as in NCCL's tuner (src/graph/tuning.cc): a launch, and a hop for each step of a
        ring, H of which leave a host. For an all-to-all, whose sends start at once, only the
        longest hop counts.
        """
        if self.world_size == 1:
            return {}
        far = self.inter_hop_ms if self.num_hosts > 1 else self.intra_hop_ms
        all_to_all = self.launch_ms + far
        inter_steps = self.num_hosts - 1
        ring = (
            self.launch_ms + (self.world_size - 1 - inter_steps) * self.intra_hop_ms + inter_steps * self.inter_hop_ms
        )
        in_host = self.launch_ms + (self.local_world_size - 1) * self.intra_hop_ms
        by_host = in_host + (self.launch_ms + self.inter_hop_ms if self.num_hosts > 1 else 0.0)
        ids = NUM_INPUT_ALL_TO_ALLS * all_to_all
        whole, rows, host = [ids, 0, all_to_all, 0, all_to_all], [ids, 0, ring, 0, ring], [ids, 0, by_host, 0, by_host]
        kinds = {
            "table_wise": whole,
            "column_wise": whole,
            "table_column_wise": whole,
            "row_wise": rows,
            "table_row_wise": host,
            "grid_shard": host,
            # an all-reduce passes the ring twice
            "data_parallel": [0, 0, 0, 0, 2 * ring - self.launch_ms],
        }
        return {kind: np.array(phases, dtype=float) for kind, phases in kinds.items()}


def links_of(hardware: Hardware) -> Links:
    return Links(
        world_size=hardware.world_size,
        local_world_size=hardware.local_world_size,
        intra=hardware.intra_host_gb_per_s * BYTES_PER_MS,
        inter=hardware.inter_host_gb_per_s * BYTES_PER_MS,
        launch_ms=hardware.collective_launch_us / 1e3,
        intra_hop_ms=hardware.intra_host_latency_us / 1e3,
        inter_hop_ms=hardware.inter_host_latency_us / 1e3,
    )
