"""Record the operations of a model's forward, backward and optimizer by shape, without computing.

The layers run on fake tensors, as plain PyTorch. Tables do not run: a module that returns rows of
the right shape replaces each EmbeddingBagCollection.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from pipeline import devices
from pipeline.config.optimizers import DenseOptimizerConfig, find_optimizer
from pipeline.data.read.batch import Batch, keyed_jagged_tensor
from pipeline.devices.cpu.host_exchange import exchanging_nothing
from pipeline.runtime.errors import PlanError

PHASES = ("forward", "backward", "optimizer")
DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
MAX_ASIDE = 8  # at least the number of columns that a loss reads

# Operations that start no kernel: they allocate memory, or return the same memory in another shape.
NO_KERNEL = {
    "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "_unsafe_view", "lift_fresh",
}  # fmt: skip
Numbers: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Operation:
    """Record one call below autograd. shapes: the shapes of tensor inputs, then of outputs; for a
    product only of the two factors.

    is_view: the call accesses no memory.
    """

    name: str
    phase: str
    shapes: tuple[Numbers, ...]
    in_bytes: int
    out_bytes: int
    dtype: str
    is_view: bool = False

    @property
    def has_kernel(self) -> bool:
        return not self.is_view and self.name not in NO_KERNEL

    @property
    def product_sizes(self) -> tuple[int, int, int, int]:
        """Return the number of products, rows and columns, and the length of the inner dimension, for a product."""
        first, second = self.shapes
        return (first[0] if len(first) == 3 else 1), first[-2], second[-1], first[-1]


@dataclass(frozen=True)
class Inputs:
    """Hold the batch of one rank. pooling: mean number of ids of each feature."""

    batch_size: int
    num_dense: int
    features: list[str]
    pooling: list[float]
    num_targets: int = 1


@dataclass(frozen=True)
class DensePart:
    """Hold the recorded operations in their order. weight_bytes: bytes of all parameters except the tables'."""

    operations: list[Operation]
    weight_bytes: int

    def of(self, phase: str) -> list[Operation]:
        return [operation for operation in self.operations if operation.phase == phase]


class _Rows(nn.Module):
    """Replace an EmbeddingBagCollection: return rows of its shape without a lookup."""

    def __init__(self, tables: EmbeddingBagCollection) -> None:
        super().__init__()
        self.names = list(tables._embedding_names)
        configs = {name: config for config in tables.embedding_bag_configs() for name in config.feature_names}
        self.dims = [config.embedding_dim for config in tables.embedding_bag_configs() for _ in config.feature_names]
        assert len(self.names) == len(self.dims) and configs

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        rows = torch.empty(features.stride(), sum(self.dims)).requires_grad_()
        return KeyedTensor(self.names, self.dims, rows)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.phase = PHASES[0]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = list(_tensors((args, kwargs or {})))
        outputs = list(_tensors(result))
        name = func.overloadpacket.__name__
        if func.namespace == "prim":
            return result
        self.operations.append(_operation(name, self.phase, inputs, outputs, bool(func.is_view)))
        return result


def record_dense(
    model: nn.Module,
    inputs: Inputs,
    optimizer: DenseOptimizerConfig,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> DensePart:
    """Record a TaskModel whose tables are on meta; the model itself does not change.

    Raises:
        PlanError: the model's forward needs values, which fake tensors do not have.
    """
    model = _without_tables(model)
    fake, recorder = FakeTensorMode(), _Recorder()
    try:
        with devices.using(devices.named("cpu", plain=True)), fake:
            _fake_parameters(model, fake)
            weights = [weight for weight in model.parameters() if weight.requires_grad]
            batch = _batch(inputs)
            stepper = find_optimizer(optimizer.name).dense(weights, optimizer) if weights else None
            with exchanging_nothing(), recorder:
                outputs = model(batch)
                (loss(outputs) if loss else outputs[0]).backward()
                recorder.phase = PHASES[2]
        operations = _marked(recorder.operations)
        return DensePart(
            [*operations, *_update(optimizer.name if stepper else "", weights)],
            sum(weight.numel() * weight.element_size() for weight in weights),
        )
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        raise PlanError(
            f"the step's time cannot be predicted: this model does not run on fake tensors ({str(error).splitlines()[0]}); "
            "plan without it by planner.predict_step=false"
        ) from error


def _update(name: str, weights: list[nn.Parameter]) -> list[Operation]:
    """Return the dense optimizer's step as one operation, because each of its kernels processes all parameters."""
    if not weights:
        return []
    numbers = sum(weight.numel() for weight in weights)
    shapes: tuple[Numbers, ...] = ((numbers,), (len(weights),))
    return [Operation(f"optimizer:{name}", PHASES[2], shapes, 4 * numbers, 4 * numbers, "fp32")]


def _marked(operations: list[Operation]) -> list[Operation]:
    """Mark the operation with which backward begins: the first gradient, which is the loss's gradient of ones."""
    first = next((i for i, operation in enumerate(operations) if operation.name == "ones_like"), len(operations))
    return [
        replace(operation, phase=PHASES[1]) if index >= first else operation
        for index, operation in enumerate(operations)
    ]


def _without_tables(model: nn.Module) -> nn.Module:
    """Return a copy whose tables are replaced. The parameters of layers are copied, the tables' are not."""
    stand_ins = {id(module): _Rows(module) for module in model.modules() if isinstance(module, EmbeddingBagCollection)}
    return copy.deepcopy(model, dict(stand_ins))


def _fake_parameters(model: nn.Module, fake: FakeTensorMode) -> None:
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                plain = torch.empty(weight.shape, dtype=weight.dtype)
                module._parameters[name] = nn.Parameter(plain, requires_grad=weight.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def _batch(inputs: Inputs) -> Batch:
    size = inputs.batch_size
    ids = [math.ceil(size * pooling) for pooling in inputs.pooling]
    features = keyed_jagged_tensor(
        inputs.features,
        torch.empty(sum(ids), dtype=torch.int64),
        torch.empty(size * len(ids), dtype=torch.int32),
        size,
        ids,
    )
    shape = (size,) if inputs.num_targets == 1 else (size, inputs.num_targets)
    of_losses = {"groups": torch.empty(size, dtype=torch.int64), "aside": torch.empty(size, MAX_ASIDE)}
    return Batch(torch.empty(size, inputs.num_dense), features, torch.empty(shape), torch.ones(shape), **of_losses)


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _operation(
    name: str, phase: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], is_view: bool
) -> Operation:
    main = outputs[0] if outputs else inputs[0] if inputs else None
    floating = next((each for each in [*inputs, *outputs] if each.dtype in DTYPE_NAMES), main)
    products = [each for each in inputs if each.dim() >= 2][-2:] if name in PRODUCTS else []
    return Operation(
        name,
        phase,
        tuple(tuple(int(size) for size in each.shape) for each in (products or [*inputs, *outputs])),
        sum(_bytes(each) for each in inputs),
        sum(_bytes(each) for each in outputs),
        DTYPE_NAMES.get(floating.dtype, "fp32") if floating is not None else "fp32",
        is_view,
    )


def _bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the memory behind a tensor.

    A number that is expanded to a shape is counted once.
    """
    spread = math.prod(size for size, step in zip(tensor.shape, tensor.stride(), strict=True) if step)
    return int(spread) * tensor.element_size()
