"""Schemas of the planner and of the hardware that it plans for (stdlib only)."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.runtime.errors import ConfigError, check_above, check_at_least, check_choice, check_within

PLANNERS = ("search", "torchrec", "file")
OBJECTIVES = ("auto", "critical_path", "max_rank", "step_time")
COMPUTE_DEVICES = ("auto", "cpu", "cuda")


@dataclass
class HardwareConfig:
    """One rank's share of a host. None = probed from the device at hand; a plan for absent hardware needs all of them.

    Capacities are per rank, in GiB (2**30 bytes); bandwidths in GB/s (1e9 bytes); latencies in microseconds: of
    issuing a collective, and of a hop within a host and between hosts. ssd_cap_gb is 0: no table of a GPU can train there.
    hosts_per_nvlink_domain: NVLink joins the GPUs of so many hosts, as in an NVL72. The intra_host_ values hold between
    all of their ranks, and table_row_wise spreads a table over them.
    ssd_gb_per_s and ssd_latency_us, of random reads, are for tables in tiers; without both of them plan measures this machine's SSD.

    Of the step's prediction: peaks of dense products in TFLOPS, microseconds that the host takes to issue an operation to a
    GPU (0: CUDA graphs), the price of a rank an hour, and the file of a calibration, which goes before the data sheet.
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
                f"hardware.ssd_cap_gb={self.ssd_cap_gb:g}: no table can train on SSD, for open-source FBGEMM has no kernel for "
                "it (github.com/pytorch/FBGEMM/issues/5666). Leave it 0; where memory is short, allow fused_uvm_caching, add "
                "ranks, or compress tables. Serving can keep tables on SSD (memory=ssd)"
            )
        check_at_least("hardware.ranks_per_host", self.ranks_per_host, 1, allow_none=True)
        check_at_least("hardware.hosts_per_nvlink_domain", self.hosts_per_nvlink_domain, 1)


@dataclass
class PlannerConfig:
    """search: our portfolio with a proven bound; torchrec: TorchRec's EmbeddingShardingPlanner; file: the plan in
    `plan_file`, refused when it is for other tables or hardware.

    `objective`, `seed` and `gap_tolerance` are for search: critical_path sums each phase's slowest rank, max_rank is the
    slowest rank's sum; the search ends once its plan is proven to be no more than `gap_tolerance` above the best possible.
    step_time goes on from there by the predicted step (hardware.calibration, or the data sheet), of which nothing is proven. auto is
    step_time for several CPU ranks where hardware.calibration has measured as many, else critical_path.
    """

    kind: str = "search"
    plan_file: str = "${paths.plans}/${name}.${hardware.name}x${world_size}.json"
    reserved_memory_fraction: float = (
        0.15  # of each capacity, kept free for activations; the dense part comes off beside it
    )
    timeout_s: float = 60.0
    objective: str = "auto"
    seed: int = 0
    gap_tolerance: float = 0.01
    predict_step: bool = True  # plan says what a whole step takes
    most_tier_stall_percent: float = 90.0  # plan refuses tables in tiers for which a step would wait more

    def __post_init__(self) -> None:
        check_choice("planner.kind", self.kind, PLANNERS)
        check_within("planner.reserved_memory_fraction", self.reserved_memory_fraction, 0.0, 0.95)
        check_choice("planner.objective", self.objective, OBJECTIVES)
        check_within("planner.most_tier_stall_percent", self.most_tier_stall_percent, 0.0, 100.0)
        check_above("planner.timeout_s", self.timeout_s, 0.0)
        check_at_least("planner.gap_tolerance", self.gap_tolerance, 0.0)


@dataclass
class TargetConfig:
    """What `plan` finds the smallest world size and hardware for: so many epochs a day, or samples a second.

    num_samples: of an epoch, where no data set says it. hardware: options of conf/hardware to try, beside the job's own; empty:
    all that state their peaks. prices: of a rank an hour, by hardware, where hardware.price_per_hour is not set.
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
                f"target.epochs_per_day={self.epochs_per_day:g} and target.samples_per_s={self.samples_per_s:g} are two targets: give one"
            )
        check_at_least("target.num_samples", self.num_samples, 1, allow_none=True)
        check_at_least("target.max_world_size", self.max_world_size, 1)
        for name, price in self.prices.items():
            check_above(f"target.prices.{name}", price, 0.0)

    @property
    def is_set(self) -> bool:
        return self.epochs_per_day is not None or self.samples_per_s is not None
