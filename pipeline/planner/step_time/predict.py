"""Predict a training step: its kernels, its collectives and its host, for a model, a plan and a machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeline.embeddings.table import Table
from pipeline.planner.collectives import links_of
from pipeline.planner.cost_model import Wire
from pipeline.planner.hardware import Hardware
from pipeline.planner.record import PHASES, PlanRecord, RankLoad
from pipeline.planner.step_time.by_bytes import NOTHING
from pipeline.planner.step_time.clocks import COMMS, COMPUTE, Clocks, Span, StepClocks, Time
from pipeline.planner.step_time.data_sheet import DataSheetTimes
from pipeline.planner.step_time.host import HostModel, host_model
from pipeline.planner.step_time.kernels import MeasuredTimes
from pipeline.planner.step_time.layer_kernels import DOTS, STACKS
from pipeline.planner.step_time.machine_state import at_rate, calibrated_probes, slowdown
from pipeline.planner.step_time.measurements import Measurements
from pipeline.planner.step_time.record import PRODUCTS, DensePart, Operation
from pipeline.planner.step_time.shards import Placement, PlannedTables, placements_of, planned_tables
from pipeline.planner.step_time.table_work import TableShape, TableWork, work_of
from pipeline.runtime.errors import ConfigError

FLAG_BYTES = 40  # pipeline.training.agreement
BUCKET_BYTES = 25 << 20  # of DistributedDataParallel: what is still to be averaged when backward ends
MOST_SHARED = 8  # ranks that exchange through shared memory
HANDED_NUMBERS = 32_768  # at::internal::GRAIN_SIZE
BATCH_NORMS = ("native_batch_norm", "native_batch_norm_backward")
NORM_PASSES, NORM_STEPS = (
    7,
    10,
)  # over all rows, and on numbers of a column each: of a norm over several ranks, either way


@dataclass(frozen=True)
class StepRequest:
    """A model's step on hardware. batch_size: of a rank; optimizer: of tables; precision: of the layers. plan: None where many
    are to be compared (StepCost)."""

    dense: DensePart
    plan: PlanRecord | None
    tables: Sequence[Table]
    hardware: Hardware
    wire: Wire
    batch_size: int
    optimizer: str
    precision: str = "fp32"
    threads: int = 1
    shared_memory: bool = True


@dataclass(frozen=True)
class StepPrediction:
    """parts: name -> milliseconds, which add up to more than the step where clocks overlap; source: where times are from."""

    step_ms: float
    samples_per_s: float
    parts: dict[str, float]
    spans: list[Span]
    source: str
    exposed_comms_ms: float
    amounts: dict[str, float] = field(default_factory=dict)

    @property
    def limit(self) -> str:
        """What most of the step is spent on."""
        return max(self.parts, key=lambda name: self.parts[name])


def predict_step(
    request: StepRequest, measurements: Measurements | None = None, beside: Mapping[str, float] | None = None
) -> StepPrediction:
    """By the measurements where there are some, else by the hardware's data sheet.

    beside: of what the probes take on the machine at the time, for its rate then (machine_state); None: the calibration's.

    Raises:
        ConfigError: the measurements lack the setup.
    """
    if measurements is not None and request.hardware.on_cpu:
        return _measured_step(request, measurements, beside or {})
    return _data_sheet_step(request)


def step_amounts(request: StepRequest, times: MeasuredTimes) -> dict[str, float]:
    """What HostModel weighs, of the slowest rank in each phase; microseconds by kernel, and counts."""
    assert request.plan is not None
    return layer_amounts(request, times) | table_amounts(request, placements_of(request.plan.plan), times)


def layer_amounts(request: StepRequest, times: MeasuredTimes) -> dict[str, float]:
    """Those that depend on no plan."""
    operations = request.dense.operations
    if request.hardware.world_size > 1:
        operations = [each for operation in operations for each in _over_all_ranks(operation)]
    amounts = {
        "constant": 1.0,
        "operations": float(sum(not each.is_view and each.name not in NOTHING for each in operations)),
        # Each product is a call of its library, on numbers and weights that no cache holds by then.
        "multiplied": float(sum(each.name in PRODUCTS for each in operations)),
        "handed": float(sum(map(_is_handed, operations))) if request.threads > 1 else 0.0,
        "features": float(sum(len(table.feature_names) for table in request.tables)),
    }
    for name in ("forward", "backward", "optimizer"):
        products, moves = _split([each for each in operations if each.phase == name], times)
        amounts[f"{name}_products"], amounts[f"{name}_moves"] = products, moves
    amounts["products"] = sum(amounts[f"{name}_products"] for name in ("forward", "backward", "optimizer"))
    amounts["moves"] = sum(amounts[f"{name}_moves"] for name in ("forward", "backward", "optimizer"))
    return amounts


def _is_handed(operation: Operation) -> bool:
    """Whether torch hands a part of it to other threads."""
    numbers = max(operation.in_bytes, operation.out_bytes) / (2 if operation.dtype == "bf16" else 4)
    return not operation.is_view and operation.name not in NOTHING and numbers >= HANDED_NUMBERS


def _over_all_ranks(operation: Operation) -> list[Operation]:
    """What a batch norm of the rows of all ranks runs in the place of torch's kernel (models.layers.batch_norm)."""
    if operation.name not in BATCH_NORMS:
        return [operation]
    rows = replace(operation, name="add", in_bytes=2 * operation.out_bytes)
    vector = replace(operation, name="add", in_bytes=0, out_bytes=0)
    return [rows] * NORM_PASSES + [vector] * NORM_STEPS


def table_amounts(request: StepRequest, placements: Sequence[Placement], times: MeasuredTimes) -> dict[str, float]:
    """Those of the tables' kernels and of the collectives."""
    planned = planned_tables(placements, request.tables, request.batch_size, request.hardware.world_size)
    works = [_work(request, shapes.shapes, times.memory_bytes) for shapes in planned.ranks]
    comms = _comms_us(request, planned, times)
    # A replicated table has a gradient of all its rows, as a layer has.
    num_bytes = max((rank.replicated_bytes for rank in planned.ranks), default=0.0)
    replicated = times.dense_gradient_us(num_bytes) if num_bytes and len(planned.ranks) > 1 else 0.0
    return {
        # Each kind of sharding has modules and exchanges of its own.
        "shardings": float(len({placed.kind for placed in placements})) if len(planned.ranks) > 1 else 0.0,
        "lookup": max((times.lookup_us(work) for work in works), default=0.0),
        "update": max((times.update_us(work) for work in works), default=0.0) + replicated,
        **{f"comms_{name}": value for name, value in comms.items()},
        "comms": sum(comms.values()),
    }


def _split(operations: Sequence[Operation], times: MeasuredTimes) -> tuple[float, float]:
    multiply = PRODUCTS + DOTS + STACKS
    products = sum(times.operation_us(each) for each in operations if each.name in multiply)
    return products, sum(times.operation_us(each) for each in operations if each.name not in multiply)


def _work(request: StepRequest, shapes: Sequence[TableShape], memory_bytes: float) -> TableWork:
    in_bf16 = request.precision == "bf16" and request.hardware.world_size == 1
    return work_of(shapes, request.optimizer, 2 if in_bf16 else 4, request.threads, memory_bytes)


def _comms_us(request: StepRequest, planned: PlannedTables, times: MeasuredTimes) -> dict[str, float]:
    """Of each exchange of a step, by name, on CPU ranks of one host."""
    world = request.hardware.world_size
    if world == 1:
        return {}
    quantized = request.wire.forward is not None
    shared = request.shared_memory and world <= MOST_SHARED
    samples = request.batch_size * world
    whole = max(rank.whole_width for rank in planned.ranks) * samples * 4.0
    rows = max(rank.rows_width for rank in planned.ranks) * samples * 4.0
    weights = request.dense.weight_bytes + max(rank.replicated_bytes for rank in planned.ranks)

    def us(kind: str, num_bytes: float) -> float:
        names = [f"shared_{kind}"] if shared else []
        for name in (*names, f"gloo_{kind}"):
            if (found := times.collective_us(name, num_bytes)) is not None:
                return found
        raise ConfigError(
            f"the calibration has no collectives between ranks; measure them: python -m pipeline calibrate setups=[{times.setup}]"
        )

    def gloo_us(kind: str, num_bytes: float) -> float:
        return times.collective_us(f"gloo_{kind}", num_bytes) or us(kind, num_bytes)

    # Gradients are copied into one block and divided by the ranks before they are summed.
    passes = times.pass_us("copy", 2 * weights) + times.pass_us("inplace", 2 * weights)
    found = {"flags": us("all_reduce", FLAG_BYTES), "average": us("all_reduce", weights) + passes}
    if norms := [each.shapes[0][-1] for each in request.dense.operations if each.name == BATCH_NORMS[0]]:
        gather = (
            "all_reduce" if shared else "all_gather"
        )  # in shared memory a sum is a gathering that each rank adds up
        found["norms"] = sum(us(gather, 4 * (1 + 2 * width)) for width in norms)
        found["norm_gradients"] = sum(us("all_reduce", 4 * 2 * width) for width in norms)
    if whole:
        exchange = gloo_us if quantized or not shared else us
        found |= {
            "ids": us("all_to_all", planned.ids_bytes),
            "rows": exchange("all_to_all", whole * (request.wire.forward or 4.0) / 4),
            "gradients": exchange("all_to_all", whole * (request.wire.backward or 4.0) / 4),
        }
    if rows:
        found |= {
            "row_ids": 3 * gloo_us("all_to_all", planned.row_ids_bytes / 3),
            "row_sums": gloo_us("reduce_scatter", rows * (request.wire.summed_forward or 4.0) / 4),
            "row_gradients": gloo_us("all_gather", rows * (request.wire.summed_backward or 4.0) / 4),
        }
    return found


def _measured_step(request: StepRequest, measurements: Measurements, beside: Mapping[str, float]) -> StepPrediction:
    times = MeasuredTimes(measurements, f"{request.hardware.world_size}x{request.threads}")
    model = host_model(measurements, times.setup)
    slower = slowdown(beside, calibrated_probes(measurements, times.setup))
    amounts = at_rate(step_amounts(request, times), slower)
    return _walk_cpu(request, amounts, model, f"calibration {measurements.name}, {measurements.conditions.date[:10]}")


def _walk_cpu(request: StepRequest, amounts: dict[str, float], model: HostModel, source: str) -> StepPrediction:
    """All but the waits is on the host's clock: shared memory is copied by the ranks themselves."""
    rates, clocks = model.rates, Clocks(host_computes=True)

    def ms(name: str, rate: str) -> float:
        return amounts.get(name, 0.0) * rates[rate] / 1e3

    def layers(phase: str) -> float:
        return ms(f"{phase}_products", "products") + ms(f"{phase}_moves", "moves")

    def comms(*names: str) -> float:
        return sum(ms(f"comms_{name}", "comms") for name in names)

    own = model.host_us(amounts) / 1e3
    parts = {
        "trainer and Python": own,
        "ids exchange": comms("ids", "row_ids"),
        "lookup": ms("lookup", "lookup"),
        "rows exchange": comms("rows", "row_sums"),
        "layers forward": layers("forward"),
        "norms exchange": comms("norms", "norm_gradients"),
        "layers backward": layers("backward"),
        "gradients exchange": comms("gradients", "row_gradients"),
        "tables update": ms("update", "update"),
        "layers average": comms("average", "flags"),
        "layers update": layers("optimizer"),
    }
    for name, duration in parts.items():
        if name.endswith(("exchange", "average")):
            clocks.communicate(name, duration, clocks.now["host"], blocks=True)
        else:
            clocks.compute(name, duration)
    step = clocks.end_ms
    rate = request.batch_size * request.hardware.world_size / step * 1e3
    exposed = sum(span.ms for span in clocks.spans if span.clock == COMMS)
    return StepPrediction(step, rate, parts, clocks.spans, source, exposed, amounts)


def _data_sheet_step(request: StepRequest) -> StepPrediction:
    assert request.plan is not None
    return SheetLayers(request).step(request.plan.ranks)


class SheetLayers:
    """Layers by roofline, the host by the number of its calls; tables and their collectives by the planner's own cost model,
    from the loads of a plan's ranks."""

    def __init__(self, request: StepRequest) -> None:
        """Raises ConfigError where the hardware does not say its peaks."""
        self._request = request
        times = self._times = DataSheetTimes(request.hardware)
        self._layers = {
            name: sum(map(times.operation_us, request.dense.of(name))) / 1e3
            for name in ("forward", "backward", "optimizer")
        }
        self._placements = placements_of(request.plan.plan) if request.plan else []

    def step(self, ranks: Sequence[RankLoad], placements: Sequence[Placement] = ()) -> StepPrediction:
        """Of the slowest rank in each phase. placements: of a plan that the request does not have."""
        slowest = {name: max(getattr(load, name) for load in ranks) for name in PHASES}
        clocks = Clocks(host_computes=self._request.hardware.on_cpu)
        self.walk(clocks, slowest, placements)
        return self._prediction(clocks)

    def walk(self, clocks: StepClocks[Time], phase: Mapping[str, Time], placements: Sequence[Placement] = ()) -> None:
        """One step along the clocks; `phase`: what the tables take, milliseconds of record.PHASES."""
        request, layers = self._request, self._layers
        kinds = {placed.kind for placed in placements or self._placements}
        clocks.issue("host", self._times.host_ms(request.dense.operations, len(kinds)))
        nothing = 0.0 * phase["input_dist_ms"]
        average = self._average_ms()
        # The pipeline hands the next batch's ids round while this one's forward computes.
        clocks.communicate("ids exchange", phase["input_dist_ms"], nothing)
        looked_up = clocks.compute("lookup", phase["forward_compute_ms"])
        clocks.wait(clocks.communicate("rows exchange", phase["forward_comms_ms"], looked_up))
        clocks.compute("layers forward", nothing + layers["forward"])
        done = clocks.compute("layers backward", nothing + layers["backward"])
        # Buckets are averaged while backward goes on; the last one is not.
        last = average * min(1.0, BUCKET_BYTES / max(request.dense.weight_bytes, 1))
        early = nothing + max(average - last, 0.0)
        overlapped = clocks.communicate("layers average", early, done - layers["backward"])
        clocks.wait(clocks.communicate("gradients exchange", phase["backward_comms_ms"], done))
        clocks.compute("tables update", phase["backward_compute_ms"])
        clocks.wait(clocks.communicate("last layers' average", nothing + last, clocks.later(done, overlapped)))
        clocks.compute("layers update", nothing + layers["optimizer"])

    def _average_ms(self) -> float:
        """Of the layers' gradients over all ranks."""
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
    """Milliseconds of a step by where its tables lie: what depends on no plan is worked out once.

    needs_loads: whether ms() goes by the ranks' loads, as with a data sheet, or by the shards' places.
    """

    def __init__(self, request: StepRequest, measurements: Measurements | None = None) -> None:
        """Raises ConfigError where neither the measurements nor the data sheet suffice."""
        self._request = request
        self.needs_loads = measurements is None or not request.hardware.on_cpu
        if measurements is None or self.needs_loads:
            self._sheet = SheetLayers(request)
            return
        self._measured = MeasuredTimes(measurements, f"{request.hardware.world_size}x{request.threads}")
        self._host = host_model(measurements, self._measured.setup)
        self._layers = layer_amounts(request, self._measured)

    def ms(self, placements: Sequence[Placement], loads: Sequence[RankLoad] = ()) -> float:
        if self.needs_loads:
            return self._sheet.step(loads, placements).step_ms
        return self._host.step_us(self._layers | table_amounts(self._request, placements, self._measured)) / 1e3
