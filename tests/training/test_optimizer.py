"""Every parameter has one optimizer, refused settings say so, and state survives torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from pipeline.config import optimizers
from pipeline.config.optimizers import DenseOptimizerConfig, OptimizerConfig, SparseOptimizerConfig
from pipeline.config.training import CommsConfig
from pipeline.runtime.errors import ShardingError
from pipeline.sharding.torchrec.sharding import shard_model
from pipeline.sharding.torchrec.sparse_optimizer import ReplicatedTablesOptimizer, apply_sparse_optimizer
from pipeline.training.optimizer import (
    DenseOptimizer,
    TrainingOptimizer,
    assert_every_parameter_has_one_optimizer,
    build_optimizer,
    clip_dense_gradients,
    clip_dense_numbers,
    dense_parameters,
    replicated_tables,
)
from tests.support.messages import mentions, names
from tests.support.optimizers import ROWWISE
from tests.support.ranks import RankPool
from tests.training import tiny
from tests.training.tiny import TABLES, TinyModel, TinyTable

KINDS = ["table_wise", "row_wise", "data_parallel"]


def tables_of(kinds: list[str]) -> list[TinyTable]:
    return [TinyTable(f"t{i}", kind) for i, kind in enumerate(kinds)]


def coverage_errors(rank: int) -> list[str]:
    model, optimizer = tiny.build(rank, tables_of(KINDS), ROWWISE)
    fused, replicated, dense = (part for _, part in optimizer.optimizers)
    assert_every_parameter_has_one_optimizer(model, [fused, replicated, dense])
    again = ReplicatedTablesOptimizer(replicated_tables(model), ROWWISE.sparse)
    errors = []
    for parts in ([fused, dense], [fused, replicated], [fused, replicated, again, dense], [replicated, dense]):
        with pytest.raises(ValueError) as error:
            assert_every_parameter_has_one_optimizer(model, parts)
        errors.append(str(error.value))
    return errors


def test_tables_without_an_optimizer_or_with_two_are_named(ranks: RankPool) -> None:
    for rank, (no_replicated, no_dense, doubled, no_fused) in enumerate(ranks.run(2, coverage_errors)):
        assert mentions(no_replicated, f"{TABLES}.embedding_bags.t2.weight")
        assert "over.0.weight" in no_dense and "embedding_bags" not in no_dense
        assert mentions(doubled, f"{TABLES}.embedding_bags.t2.weight")
        mine = ["t0", "t1"] if rank == 0 else ["t1"]  # t0 is table_wise on rank 0
        assert [name in no_fused for name in ("t0", "t1", "t2")] == [name in mine for name in ("t0", "t1", "t2")]


def forgotten(rank: int) -> str:
    tables = tables_of(KINDS)
    planned = TinyModel(tables)
    apply_sparse_optimizer(planned, ROWWISE.sparse)
    model = shard_model(TinyModel(tables), tiny.plan_of(planned, tables), CommsConfig(), tiny.context(rank))
    with pytest.raises(ValueError) as error:
        build_optimizer(model, ROWWISE)
    return str(error.value)


def test_tables_sharded_without_an_optimizer_do_not_train_by_fbgemms_default(ranks: RankPool) -> None:
    assert mentions(ranks.run(1, forgotten)[0], "t0 t1 t2")


def every_parameter_moves(rank: int, sparse: str, dense: str) -> list[str]:
    config = OptimizerConfig(SparseOptimizerConfig(sparse, lr=0.5), DenseOptimizerConfig(dense, lr=0.1))
    tables = tables_of(KINDS)
    model, optimizer = tiny.build(rank, tables, config)
    first = tiny.full_weights(model)
    for features, labels in tiny.batches(tables, 2, rank, dist.get_world_size()):
        optimizer.zero_grad()
        model(features, labels)[0].backward()
        optimizer.step()
    last = tiny.full_weights(model)
    return [name for name in first if torch.equal(first[name], last[name])]


@pytest.mark.parametrize(
    ("sparse", "dense"), [("sgd", "adagrad"), ("adagrad", "sgd"), ("rowwise_adagrad", "adam"), ("sgd", "adamw")]
)
def test_every_table_and_layer_moves(ranks: RankPool, sparse: str, dense: str) -> None:
    assert ranks.run(2, every_parameter_moves, sparse, dense) == [[], []]


def refusal(rank: int, kinds: list[str], sparse: SparseOptimizerConfig) -> str:
    with pytest.raises(ValueError) as error:
        tiny.build(rank, tables_of(kinds), OptimizerConfig(sparse))
    return str(error.value)


@pytest.mark.parametrize(("release", "fused"), [("2.11.0+cu130", False), ("2.14.1", True)])
def test_adagrad_is_fused_if_torch_has_the_kernel_for_all_devices(
    monkeypatch: pytest.MonkeyPatch, release: str, fused: bool
) -> None:
    monkeypatch.setattr(torch, "__version__", release)
    assert optimizers._is_adagrad_fused() is fused


def test_lamb_is_refused_on_cpu_and_for_replicated_tables(ranks: RankPool) -> None:
    message = ranks.run(1, refusal, ["table_wise"], SparseOptimizerConfig("lamb"))[0]
    assert mentions(message, "t0 FBGEMM GPU optimizer.sparse.name=rowwise_adagrad")
    message = ranks.run(1, refusal, ["data_parallel"], SparseOptimizerConfig("lamb"))[0]
    assert mentions(message, "optimizer.sparse.name=lamb data_parallel")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SparseOptimizerConfig("sgd", momentum=0.9), "momentum=0.9"),
        (SparseOptimizerConfig("rowwise_adagrad", eps=0.0), "eps=0"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(config: SparseOptimizerConfig, message: str) -> None:
    with pytest.raises(ShardingError, match=names(message)):
        apply_sparse_optimizer(TinyModel([TinyTable("a")]), config)


def gradient_norm(parameters: dict[str, torch.nn.Parameter]) -> float:
    gradients = [weight.grad for weight in parameters.values() if weight.grad is not None]
    assert len(gradients) == len(parameters)
    return float(torch.stack([gradient.norm() for gradient in gradients]).norm())


def clipped_norms(rank: int) -> list[tuple[float, float, float]]:
    tables = tables_of(KINDS)
    model, optimizer = tiny.build(rank, tables, ROWWISE)
    norms = []
    for (features, labels), limit in zip(
        tiny.batches(tables, 2, rank, dist.get_world_size()), (1e-3, 1e3), strict=True
    ):
        optimizer.zero_grad()
        model(features, labels)[0].backward()
        table = gradient_norm(replicated_tables(model))
        before = float(clip_dense_gradients(model, limit))
        assert gradient_norm(replicated_tables(model)) == table
        norms.append((limit, before, gradient_norm(dense_parameters(model))))
    return norms


def test_dense_gradients_are_clipped_to_the_same_global_norm_on_all_ranks(ranks: RankPool) -> None:
    on_first, on_second = ranks.run(2, clipped_norms)
    assert on_first == on_second
    (limit, before, after), (_, loose_before, loose_after) = on_first
    assert before > limit and after == pytest.approx(limit, rel=1e-3)
    assert loose_after == pytest.approx(loose_before, rel=1e-5)


def clipped_numbers(rank: int) -> list[float]:
    tables = tables_of(KINDS)
    model, optimizer = tiny.build(rank, tables, ROWWISE)
    features, labels = next(tiny.batches(tables, 1, rank, dist.get_world_size()))
    optimizer.zero_grad()
    model(features, labels)[0].backward()
    before = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    clip_dense_numbers(model, 1e-3)
    dense = dense_parameters(model)
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            expected = before[name].clamp(-1e-3, 1e-3) if name in dense else before[name]
            assert torch.equal(weight.grad, expected)
    return [float(before[name].abs().max()) for name in dense]


def test_dense_gradients_are_clipped_by_value_alike_on_all_ranks(ranks: RankPool) -> None:
    on_first, on_second = ranks.run(2, clipped_numbers)
    assert on_first == on_second and max(on_first) > 1e-3


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "adagrad"])
def test_l2_of_dense_layers_is_in_the_gradient_of_matrices_alone(name: str) -> None:
    config = DenseOptimizerConfig(name, lr=0.1, weight_decay=0.5 if name == "adamw" else 0.0)
    params = {key: torch.nn.Parameter(torch.ones(size)) for key, size in {"weight": (3, 4), "bias": (3,)}.items()}
    others = {key: torch.nn.Parameter(value.detach().clone()) for key, value in params.items()}
    ours, theirs = DenseOptimizer(params, config, l2=0.25), DenseOptimizer(others, config)
    for step in range(3):
        for key in params:
            params[key].grad = torch.full_like(params[key], 0.1 * step)
            others[key].grad = torch.full_like(params[key], 0.1 * step)
        others["weight"].grad += 0.25 * others["weight"].detach()
        ours.step()
        theirs.step()
    assert all(torch.equal(params[key], others[key]) for key in params)


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "adagrad"])
def test_a_fused_step_finds_all_of_its_state_on_the_device_of_the_weight(name: str) -> None:
    weights = {f"w{i}": torch.nn.Parameter(torch.zeros(3, 2, device="meta")) for i in range(2)}
    optimizer = DenseOptimizer(weights, DenseOptimizerConfig(name, momentum=0.9 if name == "sgd" else 0.0))
    assert all(group["fused"] for group in optimizer.param_groups)
    older = {
        key: {k: torch.ones(v.shape) for k, v in own.items()} for key, own in optimizer.state_dict()["state"].items()
    }
    for _ in range(2):
        state = [tensor for weight in weights.values() for tensor in optimizer.state[weight].values()]
        assert len(state) >= 2 and {tensor.device.type for tensor in state} == {"meta"}
        optimizer.load_state_dict({"state": older})  # an older checkpoint: its counters are on the CPU


def run_steps(model: Any, optimizer: TrainingOptimizer, tables: list[TinyTable], rank: int, steps: range) -> None:
    for step, (features, labels) in enumerate(tiny.batches(tables, steps.stop, rank, dist.get_world_size())):
        if step in steps:
            optimizer.zero_grad()
            model(features, labels)[0].backward()
            optimizer.step()


def save_at_three(rank: int, path: str, kinds: list[str], config: OptimizerConfig) -> dict[str, torch.Tensor]:
    """Save after step 3; the weights after step 6."""
    tables = tables_of(kinds)
    model, optimizer = tiny.build(rank, tables, config)
    run_steps(model, optimizer, tables, rank, range(3))
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=path)
    run_steps(model, optimizer, tables, rank, range(3, 6))
    return tiny.full_weights(model)


def resume(rank: int, path: str, kinds: list[str], config: OptimizerConfig) -> dict[str, torch.Tensor]:
    tables = tables_of(kinds)
    model, optimizer = tiny.build(rank, tables, config, seed=99)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    run_steps(model, optimizer, tables, rank, range(3, 6))
    return tiny.full_weights(model)


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize(
    ("sparse", "dense"),
    [
        pytest.param("sgd", "adam", marks=pytest.mark.campaign),
        pytest.param("adagrad", "sgd", marks=pytest.mark.campaign),
        ("rowwise_adagrad", "adam"),
        ("adam", "adam"),
        ("partial_rowwise_adam", "adamw"),
    ],
)
def test_resume_from_a_checkpoint_is_bitwise(ranks: RankPool, tmp_path: Path, sparse: str, dense: str) -> None:
    config = OptimizerConfig(SparseOptimizerConfig(sparse, lr=0.1), DenseOptimizerConfig(dense, lr=0.01, momentum=0.9))
    straight = ranks.run(2, save_at_three, str(tmp_path / "step"), KINDS, config)[0]
    assert difference(straight, ranks.run(2, resume, str(tmp_path / "step"), KINDS, config)[0]) == 0.0


@pytest.mark.long
@pytest.mark.parametrize(
    "sparse",
    [
        "adam",
        *(
            pytest.param(name, marks=pytest.mark.campaign)
            for name in ("adagrad", "rowwise_adagrad", "partial_rowwise_adam")
        ),
    ],
)
def test_checkpoint_moves_between_sharding_types_replicated_ones_too_and_world_sizes(
    ranks: RankPool, tmp_path: Path, sparse: str
) -> None:
    config = OptimizerConfig(SparseOptimizerConfig(sparse, lr=0.1), DenseOptimizerConfig("adam", lr=0.01))
    path = str(tmp_path / "step")
    straight = ranks.run(2, save_at_three, path, ["table_wise", "row_wise", "data_parallel"], config)[0]
    others = [["data_parallel", "table_wise", "row_wise"], ["row_wise", "data_parallel", "table_wise"]]
    if sparse in ("adagrad", "adam"):  # element by element, so also by columns
        others.append(["column_wise", "column_wise", "table_column_wise"])
    for kinds in others:
        on_two = difference(straight, ranks.run(2, resume, path, kinds, config)[0])
        on_one = difference(straight, ranks.run(1, resume, path, kinds, config)[0])
        print(f"{sparse}, resumed as {kinds}: differs by {on_two:.1e} on 2 ranks, by {on_one:.1e} on 1")
        assert max(on_two, on_one) < 1e-6
    if sparse == "adam":
        on_four = difference(straight, ranks.run(4, resume, path, others[-1], config)[0])
        print(f"{sparse}, resumed on 4 ranks: differs by {on_four:.1e}")
        assert on_four < 1e-6


def state_shapes(rank: int, sparse: str, dense: str) -> tuple[Any, Any]:
    kinds = KINDS
    config = OptimizerConfig(SparseOptimizerConfig(sparse), DenseOptimizerConfig(dense, momentum=0.9))
    tables = tables_of(kinds)
    model, optimizer = tiny.build(rank, tables, config)

    def shapes() -> dict[str, dict[str, Any]]:
        state = optimizer.state_dict()["state"]
        return {key: {name: tiny.full_tensor(value).shape for name, value in own.items()} for key, own in state.items()}

    before = shapes()
    first = tiny.full_weights(model)
    for _, part in optimizer.optimizers:
        if hasattr(part, "init_state"):
            part.init_state(set())  # what others call before they load
    untouched = difference(first, tiny.full_weights(model)) == 0.0
    assert untouched
    run_steps(model, optimizer, tables, rank, range(2))
    return before, shapes()


@pytest.mark.parametrize(
    ("sparse", "dense"),
    [
        ("sgd", "sgd"),
        ("rowwise_adagrad", "adam"),
        ("adagrad", "adagrad"),
        ("adam", "adamw"),
        ("partial_rowwise_adam", "adam"),
    ],
)
def test_state_has_its_final_shape_before_the_first_step(ranks: RankPool, sparse: str, dense: str) -> None:
    before, after = ranks.run(1, state_shapes, sparse, dense)[0]
    assert before == after and any(before.values())
