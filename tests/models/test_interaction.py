"""Our interaction and models give TorchRec's numbers, forward and backward, under its parameter names."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchrec.models.dlrm import DLRM, DLRM_DCN, InteractionArch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from pipeline.devices.cpu.products import multiplies_rows
from pipeline.models.layers.dlrm import CrossDLRM, DotDLRM
from pipeline.models.layers.interaction import DotInteraction, PooledRows

NAMES = ["user", "item", "place"]


def _tables() -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(name=f"t_{name}", num_embeddings=50, embedding_dim=8, feature_names=[name]) for name in NAMES
    ]
    return EmbeddingBagCollection(tables=configs)


def _batch() -> tuple[torch.Tensor, KeyedJaggedTensor]:
    lengths = torch.randint(0, 3, (3 * 32,), dtype=torch.int32)
    return torch.randn(32, 4), KeyedJaggedTensor(NAMES, torch.randint(0, 50, (int(lengths.sum()),)), lengths=lengths)


def test_the_interaction_equals_torchrecs_forward_and_backward() -> None:
    torch.manual_seed(0)
    dense, rows = torch.randn(32, 8), torch.randn(32, 5, 8)
    weights = torch.randn(32, 8 + 5 + 10)
    results = []
    for module in (InteractionArch(5), DotInteraction(5)):
        mine = [dense.clone().requires_grad_(), rows.clone().requires_grad_()]
        out = module(*mine)
        (out * weights).sum().backward()
        results.append([out, *(value.grad for value in mine)])
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("num_rows", "dim"), [(26, 16), (17, 48), (40, 20), (1, 64), (8, 128)])
def test_the_cpus_kernels_equal_torchrecs_interaction_at_any_width(num_rows: int, dim: int) -> None:
    assert multiplies_rows(torch.ones(1, 1, 1), torch.float32), "the CPU set has Numba"
    torch.manual_seed(0)
    dense, rows = torch.randn(37, dim), torch.randn(37, num_rows, dim)
    weights = torch.randn(37, dim + num_rows * (num_rows + 1) // 2)
    results = []
    for module in (InteractionArch(num_rows), DotInteraction(num_rows)):
        mine = [dense.clone().requires_grad_(), rows.clone().requires_grad_()]
        out = module(*mine)
        (out * weights).sum().backward()
        results.append([out, *(value.grad for value in mine)])
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=5e-5)


@pytest.mark.long
@pytest.mark.parametrize("dim", [16, 40])
def test_the_number_of_threads_changes_no_bit(dim: int) -> None:
    torch.manual_seed(0)
    dense, rows = torch.randn(1100, dim), torch.randn(1100, 26, dim)
    results = []
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            mine = [dense.clone().requires_grad_(), rows.clone().requires_grad_()]
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = DotInteraction(26)(*mine)
            out.float().square().sum().backward()
            results.append([out, *(value.grad for value in mine)])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("has_dense", [True, False], ids=["dense", "tables_alone"])
@pytest.mark.parametrize(
    ("num_rows", "dim"), [(26, 16), (16, 16), (33, 10), (2, 4), (26, 64), (7, 33), (16, 128), (3, 32)]
)
def test_bf16_rows_are_multiplied_to_bf16s_precision(num_rows: int, dim: int, has_dense: bool) -> None:
    """The kernel multiplies in fp32; in float64 by torch's operations."""
    torch.manual_seed(0)
    first, rows = torch.randn(21, dim).bfloat16(), torch.randn(21, num_rows, dim).bfloat16()
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        own = [value.to(dtype, copy=True).requires_grad_() for value in (first, rows)]
        module = DotInteraction(num_rows, has_dense)
        module.uses_kernel = dtype == torch.bfloat16
        out = module(own[0] if has_dense else None, own[1])
        out.backward(torch.linspace(-1, 1, out.numel()).view_as(out).bfloat16().to(dtype))
        results.append([out.detach(), *(value.grad for value in own if value.grad is not None)])
    for ours, exact in zip(*results, strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.double(), exact, rtol=2**-6, atol=0.05)


def test_it_is_exported_for_any_batch_size() -> None:
    torch.manual_seed(0)
    module, batch = DotInteraction(5), torch.export.Dim("batch", min=2, max=4096)
    shapes = ({0: batch}, {0: batch})
    exported = torch.export.export(module, (torch.randn(7, 8), torch.randn(7, 5, 8)), dynamic_shapes=shapes).module()
    inputs = torch.randn(3, 8), torch.randn(3, 5, 8)
    torch.testing.assert_close(exported(*inputs), module(*inputs))


def test_gradients_are_the_derivatives() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(3, 4, dtype=torch.float64).requires_grad_(), torch.randn(3, 5, 4).double().requires_grad_()]
    assert torch.autograd.gradcheck(DotInteraction(5), inputs)


def test_under_autocast_the_products_are_bf16_and_close_to_those_of_fp32() -> None:
    torch.manual_seed(0)
    dense, rows = torch.randn(64, 16), torch.randn(64, 6, 16)
    exact = DotInteraction(6)(dense, rows)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = DotInteraction(6)(dense, rows)
    assert rounded.dtype == torch.bfloat16
    assert 0 < float((rounded.float() - exact).abs().max()) < 0.02 * float(exact.abs().max())


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_rows_are_in_the_models_order_whatever_the_plans_is(order: list[int]) -> None:
    torch.manual_seed(0)
    by_name = {name: torch.randn(4, 8) for name in NAMES}
    keys = [NAMES[index] for index in order]
    values = torch.cat([by_name[key] for key in keys], dim=1).requires_grad_()
    rows = PooledRows(NAMES)(KeyedTensor(keys, [8, 8, 8], values))
    assert torch.equal(rows, torch.stack(list(by_name.values()), dim=1))
    (rows * torch.tensor([1.0, 2.0, 3.0])[:, None]).sum().backward()
    assert values.grad is not None
    assert values.grad[0, ::8].tolist() == [index + 1.0 for index in order]


@pytest.mark.parametrize(
    ("theirs", "ours", "extra"),
    [(DLRM, DotDLRM, {}), (DLRM_DCN, CrossDLRM, {"dcn_num_layers": 2, "dcn_low_rank_dim": 4})],
    ids=["dlrm", "dlrm_dcn"],
)
def test_a_model_equals_torchrecs_with_its_state(
    theirs: type[nn.Module], ours: type[nn.Module], extra: dict[str, int]
) -> None:
    torch.manual_seed(0)
    sizes = {"dense_in_features": 4, "dense_arch_layer_sizes": [16, 8], "over_arch_layer_sizes": [16, 1]}
    models = [kind(embedding_bag_collection=_tables(), **sizes, **extra) for kind in (theirs, ours)]
    models[1].load_state_dict(models[0].state_dict())  # strict: the same names
    dense, sparse = _batch()
    logits = [model(dense, sparse) for model in models]
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-5, atol=1e-5)
    for one in logits:
        one.square().sum().backward()
    for (name, mine), reference in zip(models[1].named_parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(
            mine.grad, reference.grad, rtol=1e-4, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}"
        )
