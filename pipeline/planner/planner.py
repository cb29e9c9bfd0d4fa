"""Search a ShardingPlan and its cost for a model, its tables and the hardware. All ranks get the
same plan.

TorchRec enumerates and estimates options; a searcher of SEARCHERS chooses among them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner, to_sharding_plan, validate_rank_assignment
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.types import PlannerError, ShardingOption
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from pipeline import devices
from pipeline.config.planner import HardwareConfig, PlannerConfig
from pipeline.config.registry import if_installed
from pipeline.embeddings.table import Table
from pipeline.planner.chosen_plan import ChosenPlan, build_record, rank_loads
from pipeline.planner.estimator import CostedEnumerator
from pipeline.planner.hardware import build_topology, resolve_hardware
from pipeline.planner.plan_codec import decode_record, encode_record, load_plan, read_plan
from pipeline.planner.plan_record import Objective, PlanRecord, differing_libraries, differing_lines
from pipeline.planner.request import (
    Placement,
    PlanRequest,
    Problem,
    StepCost,
    TableOptimizer,
    build_problem,
    fingerprint_of,
    table_bytes,
)
from pipeline.planner.search.incumbent import Infeasible, SearchConfig
from pipeline.planner.searcher import PlanPrice, enumerate_options, search_options
from pipeline.runtime.byte_counts import show_bytes
from pipeline.runtime.errors import PlanError, UserError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.process.distributed import DistributedContext

AUTO, STEP_TIME = "auto", "step_time"  # values of planner.objective
# all ranks wait for rank 0; after this time the log says how to plan in advance
LONG_SEARCH_S = 20.0
logger = get_logger(__name__)


# Two parameters of the config, three of the model, and others of the ranks, the run and the
# prediction: the trainer has no object with all of them.
def load_or_search_plan(
    config: PlannerConfig,
    hardware: HardwareConfig,
    tables: list[Table],
    model: nn.Module,
    sharders: list[ModuleSharder[nn.Module]],
    *,
    optimizer: TableOptimizer,
    batch_size: int,
    context: DistributedContext,
    num_ranks: int | None = None,
    earlier: str | None = None,
    step_cost: Callable[[PlanRequest], StepCost] | None = None,
) -> PlanRecord:
    """Collective: rank 0 reads or searches the plan; every rank gets the same plan or PlanError.

    num_ranks: number of ranks in the plan; None: all ranks. earlier: the plan file of the resumed
    run. step_cost: the prediction for planner.objective=step_time and auto.
    """
    text, error = "", ""
    if context.is_main:
        try:
            here = resolve_hardware(
                hardware,
                num_ranks or context.world_size,
                local_world_size=context.local_world_size,
                device_type=devices.current().device_type,
            )
            request = PlanRequest(
                tables, model, sharders, here, optimizer, batch_size,
                step_cost=step_cost, calibration=hardware.calibration,
            )  # fmt: skip
            began = time.monotonic()
            record = make_plan(config, request, earlier)
            if (
                config.kind != "file"
                and (seconds := time.monotonic() - began) > LONG_SEARCH_S
                and context.world_size > 1
            ):
                logger.info(
                    "plan        found in %.0f s, for which %d ranks waited; to plan in advance run: python -m "
                    "pipeline plan <this job's overrides> world_size=%d, and train with planner=file",
                    seconds, context.world_size, context.world_size,
                )  # fmt: skip
            text = encode_record(record)
        except UserError as failure:
            if context.world_size == 1:
                raise
            error = str(failure)
    if context.world_size > 1:
        message = [text, error]
        dist.broadcast_object_list(message, src=0, device=context.device)
        text, error = message
    if error:
        raise PlanError(error)
    # Also on rank 0, so that every rank uses what a file would contain.
    return decode_record(text)


def make_plan(config: PlannerConfig, request: PlanRequest, earlier: str | None = None) -> PlanRecord:
    """Local: return the plan in planner.plan_file, the plan in `earlier` if it is valid, or a new plan."""
    problem = build_problem(config, request)
    if config.kind != "file":
        return (_earlier_plan(earlier, config, problem) if earlier else None) or search_plan(config, problem)
    hardware = request.hardware
    command = f"python -m pipeline plan <this job's overrides> world_size={hardware.world_size} planner.plan_file={config.plan_file}"
    expected = fingerprint_of(problem)
    record = load_plan(config.plan_file, expected, command)
    _check_fits(record, problem.usable, f"plan file {config.plan_file}", command)
    return record


def _earlier_plan(path: str, config: PlannerConfig, problem: Problem) -> PlanRecord | None:
    """Return the plan in `path` if it was made for exactly this problem. Otherwise log the differences."""
    try:
        record = read_plan(path)
        expected = fingerprint_of(problem)
        lines = differing_lines(record.fingerprint, expected) + differing_libraries(record.fingerprint, expected)
        if record.planner != config.kind:
            lines.insert(0, f"planner: {record.planner}, now {config.kind}")
        if lines:
            more = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
            raise PlanError(f"it was made for another job ({lines[0]}{more})")
        _check_fits(record, problem.usable, "it", "")
    except (OSError, UserError) as error:
        logger.info("plan        searching again because %s is not valid here: %s", path, str(error).splitlines()[0])
        return None
    logger.info("plan        %s is still valid: no search", path)
    return record


def explain_misfit(record: PlanRecord, config: PlannerConfig, request: PlanRequest) -> list[str]:
    """List why a plan cannot be used for `request`. The list is empty if the plan can be used."""
    problem = build_problem(config, request)
    expected = fingerprint_of(problem)
    differing = differing_lines(record.fingerprint, expected)
    return differing or [f"it puts {overfull}" for overfull in _overfull_ranks(record, problem.usable)]


def search_plan(config: PlannerConfig, problem: Problem) -> PlanRecord:
    """Search a plan, the same in every process unless planner.timeout_s ends the search."""
    found = SEARCHERS[config.kind](config, problem) if problem.placed else NO_TABLES
    record = build_record(config.kind, problem, found)
    _check_fits(record, problem.usable, f"{config.kind}'s plan", "raise planner.reserved_memory_fraction")
    return record


NO_TABLES = ChosenPlan(ShardingPlan({}), [], "nothing", lower_bound_ms=0.0, gap=0.0)


def _search_torchrec(config: PlannerConfig, problem: Problem) -> ChosenPlan:
    request = problem.request
    topology = build_topology(request.hardware)
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=request.batch_size,
        enumerator=CostedEnumerator(
            topology, request.batch_size, problem.constraints, request.optimizer.name, problem.costs
        ),
        storage_reservation=problem.reservation,
        constraints=problem.constraints,
        stats=NoopEmbeddingStats(),
        debug=False,
        timeout_seconds=config.timeout_s,
    )
    started = time.monotonic()
    try:
        plan = planner.plan(request.model, request.sharders)
    except (PlannerError, RuntimeError) as error:  # TorchRec raises both if nothing fits
        raise _no_plan(config, problem) from error
    if time.monotonic() - started > config.timeout_s:
        logger.warning(
            "planner.timeout_s=%g ended the search early: a longer search may find a better plan", config.timeout_s
        )
    options = planner._best_plan
    assert options, "a model without tables"
    return ChosenPlan(plan, options, "max_rank")


def _search_portfolio(config: PlannerConfig, problem: Problem) -> ChosenPlan:
    """Let TorchRec enumerate and estimate options, our search choose among them, and TorchRec validate the choice."""
    request = problem.request
    topology = build_topology(request.hardware)
    try:
        enumerated, num_proposed = enumerate_options(problem)
        step_cost = _step_cost(config, request)
        objective = "critical_path" if config.objective in (AUTO, STEP_TIME) else config.objective
        settings = SearchConfig(objective, config.seed, config.timeout_s, config.gap_tolerance)
        options, result = search_options(
            enumerated, num_proposed, request.hardware, problem.usable, settings, problem.costs.links.latencies_ms(),
            None if step_cost is None else _step_price(problem, step_cost),
        )  # fmt: skip
    except (Infeasible, RuntimeError) as error:  # TorchRec raises RuntimeError if a table has no option
        raise _no_plan(config, problem) from error
    if result.cut_short:
        busy = f" (the machine is busy: {result.busy:.1f} s of the clock for each of CPU)" if result.busy > 1.5 else ""
        logger.warning(
            "planner.timeout_s=%g ended the search early%s: a longer search may find a better plan",
            config.timeout_s,
            busy,
        )
    logger.info(
        "search: %s found %.4g ms %s in %.1f s, at most %.2f %% above the best possible",
        result.winner, result.score.of(objective), objective, result.seconds, 100 * result.gap,
    )  # fmt: skip
    plan = to_sharding_plan(options, topology)
    validate_rank_assignment(plan, topology)
    # If not all of TorchRec's proposals were tried, its planner may have found a better plan.
    torchrec_score = result.torchrec if result.torchrec_complete else None
    torchrec_found = (
        None
        if torchrec_score is None
        else Objective("max_rank", torchrec_score.max_rank_ms, torchrec_score.critical_path_ms)
    )
    if step_cost is not None:  # nothing is proven about the step
        return ChosenPlan(plan, options, STEP_TIME, torchrec=torchrec_found)
    return ChosenPlan(plan, options, objective, result.lower_bound_ms, result.gap, torchrec_found)


def _step_cost(config: PlannerConfig, request: PlanRequest) -> StepCost | None:
    """Return the object that predicts the step of a plan, or None if the objective does not use it.

    Raises PlanError or UserError if planner.objective=step_time and the step cannot be predicted.
    """
    if config.objective == STEP_TIME:
        if request.step_cost is None:
            raise PlanError(f"planner.objective={STEP_TIME} is not for this verb: use critical_path or max_rank")
        return request.step_cost(request)
    hardware = request.hardware
    may_be_measured = request.calibration is not None and hardware.on_cpu and hardware.world_size > 1
    if config.objective != AUTO or request.step_cost is None or not may_be_measured or not config.predict_step:
        return None
    try:
        cost = request.step_cost(request)
        cost.ms([])  # raises if a measurement is missing
    except UserError as error:
        logger.warning("planned by critical_path, because the step cannot be predicted: %s", str(error).splitlines()[0])
        return None
    return cost


def _step_price(problem: Problem, cost: StepCost) -> PlanPrice:
    request, latencies = problem.request, problem.costs.links.latencies_ms()

    def price(options: list[ShardingOption]) -> float:
        loads = rank_loads(options, request.hardware.world_size, latencies) if cost.needs_loads else ()
        return cost.ms([_placement(option) for option in options], loads)

    return price


def _placement(option: ShardingOption) -> Placement:
    shards = () if option.sharding_type == "data_parallel" else option.shards
    return Placement(
        option.name,
        option.sharding_type,
        tuple((int(shard.rank or 0), shard.offset[0], shard.size[0], shard.size[1]) for shard in shards),
    )


def _no_plan(config: PlannerConfig, problem: Problem) -> PlanError:
    hardware, optimizer = problem.request.hardware, problem.request.optimizer.name
    needed = sum(table_bytes(entry, optimizer) for entry in problem.placed)
    head = (
        f"no plan holds the {len(problem.placed)} tables: with their {optimizer} state they need "
        f"{show_bytes(needed)}, but {hardware.world_size} rank(s) of {hardware.name} "
        f"have {show_bytes(hardware.world_size * sum(problem.usable))} for them"
    )
    explain = if_installed("explain_infeasible")
    return PlanError("\n".join([head, *(explain(config, problem) if explain else ())]))


SEARCHERS: dict[str, Callable[[PlannerConfig, Problem], ChosenPlan]] = {
    "search": _search_portfolio,
    "torchrec": _search_torchrec,
}


def _check_fits(record: PlanRecord, usable: tuple[int, int], what: str, hint: str) -> None:
    for overfull in _overfull_ranks(record, usable):
        raise PlanError(f"{what} puts {overfull}; {hint}")


def _overfull_ranks(record: PlanRecord, usable: tuple[int, int]) -> Iterator[str]:
    for load in record.ranks:
        for tier, taken, room in (
            ("HBM", load.hbm_bytes, usable[0]),
            ("host memory", load.ddr_bytes, usable[1]),
            ("SSD", load.ssd_bytes, record.usable_ssd_bytes),
        ):
            if taken > room:
                yield (
                    f"{show_bytes(taken)} of tables into the {tier} of rank {load.rank}, which "
                    f"has {show_bytes(room)} left without the dense part and the reserve"
                )
