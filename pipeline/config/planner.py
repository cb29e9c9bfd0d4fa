"""Define the schemas of the planner and of the hardware that it plans for (stdlib only)."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.runtime.errors import ConfigError, check_above, check_at_least, check_choice, check_within

PLANNERS = ("search", "torchrec", "file")
OBJECTIVES = ("auto", "critical_path", "max_rank", "step_time")
COMPUTE_DEVICES = ("auto", "cpu", "cuda")


@dataclass
class HardwareConfig:
    """One rank's share of a host. None is probed from the local device; a plan for other hardware
    needs all values.

    Capacities are per rank in GiB (2**30 bytes), bandwidths in GB/s (1e9 bytes), latencies in microseconds:
    of starting a collective, and of a transfer within a host and between hosts. ssd_cap_gb must be 0: no
    table of a GPU can train on an SSD. hosts_per_nvlink_domain: NVLink connects the GPUs of that many hosts,
    as in an NVL72; the intra_host_ values then hold between all these ranks, and table_row_wise can use all
    of them. ssd_gb_per_s and ssd_latency_us (random reads) are for tables in tiers; if either is unset,
    `plan` measures this machine's SSD.

    The prediction of steps uses: peaks of dense products in TFLOPS, microseconds in which the host
    launches a GPU operation (0: CUDA graphs), the price of a rank per hour, and a calibration file,
    which has priority over the data sheet.
    """

    name: str = "auto"
    compute_device: str = "auto"
    hbm_cap_gb: float | None = None
    ddr_cap_gb: float | None = None
    hbm_gb_per_s: float | None = None
    ddr_gb_per_s: float | None = None
    hbm_to_ddr_gb_per_s: float | None = None
    intra_host_gb_per_s: float | None = None
    inter_host_gb_per_s: float | None = None
    ssd_cap_gb: float = 0.0
    ssd_gb_per_s: float = 0.0
    ssd_latency_us: float | None = None
    collective_launch_us: float | None = None
    intra_host_latency_us: float | None = None
    inter_host_latency_us: float | None = None
    ranks_per_host: int | None = None
    hosts_per_nvlink_domain: int = 1
    tflops_fp32: float | None = None
    tflops_bf16: float | None = None
    issue_us: float | None = None
    price_per_hour: float | None = None
    calibration: str | None = None

    def __post_init__(self) -> None:
        check_choice("hardware.compute_device", self.compute_device, COMPUTE_DEVICES)
        for name, value in vars(self).items():
            if value is not None and name.endswith(("_gb", "_gb_per_s", "_us", "_fp32", "_bf16", "_hour")):
                check_at_least(f"hardware.{name}", value, 0.0)
        if self.ssd_cap_gb:
            raise ConfigError(
                f"hardware.ssd_cap_gb={self.ssd_cap_gb:g}: no table can train on SSD because open-source FBGEMM has no kernel for "
                "it (github.com/pytorch/FBGEMM/issues/5666). Leave it 0; if memory is short, allow fused_uvm_caching, add "
                "ranks, or compress tables. Serving can keep tables on SSD (memory=ssd)"
            )
        check_at_least("hardware.ranks_per_host", self.ranks_per_host, 1, allow_none=True)
        check_at_least("hardware.hosts_per_nvlink_domain", self.hosts_per_nvlink_domain, 1)


@dataclass
class PlannerConfig:
    """The planner. search: our search with a proven bound; torchrec: TorchRec's
    EmbeddingShardingPlanner; file: the plan in `plan_file`, refused if it was made for other
    tables or hardware.

    `objective`, `seed` and `gap_tolerance` are for kind=search. critical_path adds up the slowest rank of each
    phase; max_rank is the sum of the slowest rank. The search ends when its plan is proven to be at most
    `gap_tolerance` above the optimum. step_time then improves the plan by the predicted step time
    (hardware.calibration, or the data sheet), without a proven bound. auto is step_time for several CPU ranks
    if hardware.calibration has measured that many, otherwise critical_path.
    """

    kind: str = "search"
    plan_file: str = "${paths.plans}/${name}.${hardware.name}x${world_size}.json"
    # Share of each capacity that stays free for activations; the dense part is subtracted separately.
    reserved_memory_fraction: float = 0.15
    timeout_s: float = 60.0
    objective: str = "auto"
    seed: int = 0
    gap_tolerance: float = 0.01
    predict_step: bool = True  # `plan` predicts the time of a complete step
    # `plan` refuses tables in tiers if a step would wait longer
    most_tier_stall_percent: float = 90.0

    def __post_init__(self) -> None:
        check_choice("planner.kind", self.kind, PLANNERS)
        check_within("planner.reserved_memory_fraction", self.reserved_memory_fraction, 0.0, 0.95)
        check_choice("planner.objective", self.objective, OBJECTIVES)
        check_within("planner.most_tier_stall_percent", self.most_tier_stall_percent, 0.0, 100.0)
        check_above("planner.timeout_s", self.timeout_s, 0.0)
        check_at_least("planner.gap_tolerance", self.gap_tolerance, 0.0)


@dataclass
class TargetConfig:
    """Target of `plan`, which finds the smallest world size and hardware for it: epochs per day, or
    samples per second.

    num_samples: samples of an epoch, if there is no data set. hardware: options of conf/hardware to
    try in addition to the job's; empty means all that state their peaks. prices: hardware -> price
    of a rank per hour, if hardware.price_per_hour is not set.
    """

    epochs_per_day: float | None = None
    samples_per_s: float | None = None
    num_samples: int | None = None
    hardware: list[str] = field(default_factory=list)
    max_world_size: int = 1024
    prices: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("epochs_per_day", "samples_per_s"):
            value = getattr(self, name)
            if value is not None:
                check_above(f"target.{name}", value, 0.0)
        if self.epochs_per_day is not None and self.samples_per_s is not None:
            raise ConfigError(
                f"target.epochs_per_day={self.epochs_per_day:g} and target.samples_per_s={self.samples_per_s:g} are two targets: set only one"
            )
        check_at_least("target.num_samples", self.num_samples, 1, allow_none=True)
        check_at_least("target.max_world_size", self.max_world_size, 1)
        for name, price in self.prices.items():
            check_above(f"target.prices.{name}", price, 0.0)

    @property
    def is_set(self) -> bool:
        return self.epochs_per_day is not None or self.samples_per_s is not None
