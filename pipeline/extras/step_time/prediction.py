"""Predict a training step for a model, a plan and a machine.

With a calibration, the time of a step on CPU ranks is a sum of amounts (work.py), each multiplied
by a measured rate. With a data sheet, operations process their bytes or FLOPs at a share of the
peak, and three clocks run in parallel: the host that issues operations, the device that computes,
the network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.embeddings.table import Table
from pipeline.extras.step_time.calibration import Calibration, step_us
from pipeline.extras.step_time.clocks import COMMS, COMPUTE, Clocks, Span, StepClocks, Time
from pipeline.extras.step_time.data_sheet import DataSheetTimes
from pipeline.extras.step_time.recorded_layers import DensePart
from pipeline.extras.step_time.work import Placement, layer_amounts, placements_of, table_amounts
from pipeline.planner.cost_model import Wire
from pipeline.planner.hardware import Hardware, links_of
from pipeline.planner.plan_record import PHASES, PlanRecord, RankLoad

BUCKET_BYTES = 25 << 20  # of DistributedDataParallel: what is not yet averaged when backward ends
# Part of the step -> the amounts that it sums up.
CPU_PARTS = {
    "trainer and Python": ("steps", "calls", "products", "handed", "features"),
    "lookup and update": ("bags", "ids", "row_bytes", "pooled_bytes", "state_bytes"),
    "layers' products": ("flops_fp32", "flops_bf16", "batched_flops", "fp32_product_bytes", "bf16_product_bytes"),
    "layers' other operations": ("moved_bytes", "drawn_bytes", "norm_bytes"),
    "tables exchange": ("whole_shardings", "row_shardings", "whole_exchange_bytes", "row_exchange_bytes"),
    "layers exchange": ("replicated_shardings", "norms", "averaged_bytes"),
    "layers update": ("updated_layer_bytes",),
}


@dataclass(frozen=True)
class StepRequest:
    """Hold a model's step on hardware. batch_size: samples per rank. optimizer: the tables'
    optimizer. plan: None to compare many plans (StepCost).
    """

    dense: DensePart
    plan: PlanRecord | None
    tables: Sequence[Table]
    hardware: Hardware
    wire: Wire
    batch_size: int
    optimizer: str
    threads: int = 1

    @property
    def setup(self) -> str:
        return f"{self.hardware.world_size}x{self.threads}"

    def amounts(self, placements: Sequence[Placement]) -> dict[str, float]:
        """Return what a calibration's rates are multiplied by."""
        return layer_amounts(self.dense, self.threads) | self.table_amounts(placements)

    def table_amounts(self, placements: Sequence[Placement]) -> dict[str, float]:
        return table_amounts(
            placements, self.tables, self.dense, self.optimizer, self.wire, self.batch_size,
            self.hardware.world_size,
        )  # fmt: skip


@dataclass(frozen=True)
class StepPrediction:
    """Hold a predicted step. parts: name -> milliseconds; their sum exceeds the step if clocks
    overlap. source: where the times come from.
    """

    step_ms: float
    samples_per_s: float
    parts: dict[str, float]
    spans: list[Span]
    source: str
    exposed_comms_ms: float

    @property
    def limit(self) -> str:
        """Return the part that takes most of the step's time."""
        return max(self.parts, key=lambda name: self.parts[name])


def predict_step(request: StepRequest, calibration: Calibration | None = None) -> StepPrediction:
    """Predict with the calibration if there is one and the ranks are CPUs, otherwise with the
    hardware's data sheet.

    Raises:
        ConfigError: the calibration lacks the setup, or the data sheet lacks the peaks.
    """
    assert request.plan is not None
    if calibration is None or not request.hardware.on_cpu:
        return SheetLayers(request).step(request.plan.ranks)
    amounts = request.amounts(placements_of(request.plan.plan))
    rates = calibration.rates(request.setup)
    clocks, parts = Clocks(host_computes=True), {}
    for name, names in CPU_PARTS.items():
        parts[name] = sum(rates[each] * amounts[each] for each in names) / 1e3
        # Ranks of one host copy their exchanges themselves, so an exchange takes the host's time.
        send = name.endswith("exchange")
        clocks.communicate(name, parts[name]) if send else clocks.compute(name, parts[name])
    step = clocks.end_ms
    source = (
        f"calibration {calibration.name}, {calibration.conditions.date[:10]}, whose own steps it "
        f"predicts to {100 * calibration.error(request.setup):.0f} %"
    )
    rate = request.batch_size * request.hardware.world_size / step * 1e3
    exposed = sum(span.ms for span in clocks.spans if span.clock == COMMS)
    return StepPrediction(step, rate, parts, clocks.spans, source, exposed)


class SheetLayers:
    """Predict layers by a roofline, the host's time by its number of calls, and tables and
    collectives by the cost model.
    """

    def __init__(self, request: StepRequest) -> None:
        """Prepare the times. Raises ConfigError if the hardware does not state its peaks."""
        self._request = request
        times = self._times = DataSheetTimes(request.hardware)
        self._layers = {
            name: sum(map(times.operation_us, request.dense.of(name))) / 1e3
            for name in ("forward", "backward", "optimizer")
        }
        self._placements = placements_of(request.plan.plan) if request.plan else []

    def step(self, ranks: Sequence[RankLoad], placements: Sequence[Placement] = ()) -> StepPrediction:
        """Return the predicted step; each phase takes as long as on its slowest rank. placements:
        needed if the request has no plan.
        """
        slowest = {name: max(getattr(load, name) for load in ranks) for name in PHASES}
        clocks = Clocks(host_computes=self._request.hardware.on_cpu)
        self.walk(clocks, slowest, placements)
        return self._prediction(clocks)

    def walk(self, clocks: StepClocks[Time], phase: Mapping[str, Time], placements: Sequence[Placement] = ()) -> None:
        """Run one step on the clocks. `phase`: milliseconds of the tables, by
        plan_record.PHASES.
        """
        request, layers = self._request, self._layers
        kinds = {placed.kind for placed in placements or self._placements}
        clocks.issue("host", self._times.host_ms(request.dense.operations, len(kinds)))
        nothing = 0.0 * phase["input_dist_ms"]
        average = self._average_ms()
        # The pipeline exchanges the next batch's ids while this batch's forward computes.
        clocks.communicate("ids exchange", phase["input_dist_ms"], nothing)
        looked_up = clocks.compute("lookup", phase["forward_compute_ms"])
        clocks.wait(clocks.communicate("rows exchange", phase["forward_comms_ms"], looked_up))
        clocks.compute("layers forward", nothing + layers["forward"])
        done = clocks.compute("layers backward", nothing + layers["backward"])
        # Buckets are averaged during backward, except for the last one.
        last = average * min(1.0, BUCKET_BYTES / max(request.dense.weight_bytes, 1))
        early = nothing + max(average - last, 0.0)
        overlapped = clocks.communicate("layers average", early, done - layers["backward"])
        clocks.wait(clocks.communicate("gradients exchange", phase["backward_comms_ms"], done))
        clocks.compute("tables update", phase["backward_compute_ms"])
        clocks.wait(clocks.communicate("last layers' average", nothing + last, clocks.later(done, overlapped)))
        clocks.compute("layers update", nothing + layers["optimizer"])

    def _average_ms(self) -> float:
        """Return the milliseconds in which the layers' gradients are averaged over all ranks."""
        hardware = self._request.hardware
        if hardware.world_size == 1:
            return 0.0
        links = links_of(hardware)
        ring = links.latencies_ms()["data_parallel"][-1]
        return float(ring) + 2 * float(links.ring_ms(float(self._request.dense.weight_bytes)))  # type: ignore[arg-type]

    def _prediction(self, clocks: Clocks) -> StepPrediction:
        request, step = self._request, clocks.end_ms
        parts: dict[str, float] = {}
        for span in clocks.spans:
            parts[span.name] = parts.get(span.name, 0.0) + span.ms
        computed = sum(span.ms for span in clocks.spans if span.clock == COMPUTE)
        exposed = max(0.0, max(clocks.now[COMPUTE], clocks.now[COMMS]) - computed)
        source = f"data sheet of {request.hardware.name}: no calibration was given; {self._times.assumptions}"
        rate = request.batch_size * request.hardware.world_size / step * 1e3
        return StepPrediction(step, rate, parts, clocks.spans, source, exposed)


class StepCost:
    """Return the milliseconds of a step for a placement of tables.

    Work that does not depend on the plan is computed once.

    needs_loads: ms() uses the loads of the ranks instead of the placement. This is so with a data
    sheet.
    """

    def __init__(self, request: StepRequest, calibration: Calibration | None = None) -> None:
        """Prepare the prediction. Raises ConfigError if neither the calibration nor the data sheet suffices."""
        self._request = request
        self.needs_loads = calibration is None or not request.hardware.on_cpu
        if calibration is None or self.needs_loads:
            self._sheet = SheetLayers(request)
            return
        self._rates = calibration.rates(request.setup)
        self._layers_us = step_us(layer_amounts(request.dense, request.threads), self._rates)

    def ms(self, placements: Sequence[Placement], loads: Sequence[RankLoad] = ()) -> float:
        if self.needs_loads:
            return self._sheet.step(loads, placements).step_ms
        tables_us = step_us(self._request.table_amounts(placements), self._rates)
        return (self._layers_us + tables_us) / 1e3
