"""Compute the sizes of all values of exported layers before any value is computed, and refuse giant ones."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.fx
from torch._subclasses import fake_tensor

from pipeline.serving.scoring.program_graph import MAX_INT, GraphProblem

MAX_VALUE_ELEMENTS = 1 << 24  # of one intermediate value for SAMPLE_ROWS rows, besides those that the file stores
MAX_ELEMENTS = 1 << 28  # of all intermediate values together
SAMPLE_ROWS = 2
MAX_PARTS = 1 << 16  # of one value that an operator takes apart


class _Sizes(torch.fx.Interpreter):
    """Computes the sizes of all values without computing the values. Raises GraphProblem for more than the limits."""

    def __init__(self, module: torch.fx.GraphModule, mode: Any, num_stored: int) -> None:
        super().__init__(module)
        self._mode, self._largest, self._total = mode, MAX_VALUE_ELEMENTS + num_stored, 0

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._mode.from_tensor(vars(self.module)[target])

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if (num_parts := _num_parts(target, args, kwargs)) > MAX_PARTS:
            raise GraphProblem(f"takes a value apart into {num_parts}, more than {MAX_PARTS}")
        return super().call_function(target, args, kwargs)

    def run_node(self, n: torch.fx.Node) -> Any:
        found = super().run_node(n)
        n.meta["val"] = found
        for value in found if isinstance(found, tuple | list) else [found]:
            if isinstance(value, torch.Tensor):
                self._total += value.numel()
                if value.numel() > self._largest or self._total > MAX_ELEMENTS + self._largest:
                    raise GraphProblem(f"computes a value of {value.numel()} numbers for {SAMPLE_ROWS} rows")
            elif isinstance(value, int | float) and not -MAX_INT <= value < MAX_INT:
                raise GraphProblem(f"computes the size {value!r:.80}")
        return found


def _num_parts(target: Any, args: Any, kwargs: Any) -> int:
    """How many tensors the operator gives, counted before they are made; 1 for an operator that gives a fixed number."""
    name = getattr(getattr(target, "_schema", None), "name", "").removeprefix("aten::")
    if name not in ("unbind", "split", "chunk"):
        return 1
    given = {**dict(zip((each.name for each in target._schema.arguments), args, strict=False)), **kwargs}
    size, parts = given["self"].shape[given.get("dim", 0)], given.get("split_size", given.get("chunks", 1))
    if isinstance(parts, list | tuple):
        return len(parts)
    return int(parts) if name == "chunk" else int(size) // max(int(parts), 1)


def check_sizes(module: torch.fx.GraphModule, widths: list[int], num_stored: int) -> None:
    """Give each node of `module` its value in meta["val"], a tensor without memory.

    Raises:
        GraphProblem: the operators do not fit each other, or a value is larger than the limits.
    """
    logger = logging.getLogger(fake_tensor.__name__)
    logger.addFilter(_nothing)  # it logs the traceback of what is reported below
    try:
        with fake_tensor.FakeTensorMode() as mode:
            inputs = [torch.empty(SAMPLE_ROWS, width) for width in widths]
            (found,) = _Sizes(module, mode, num_stored).run(*inputs, enable_io_processing=False)
    except GraphProblem:
        raise
    except Exception as error:  # an operator may raise anything for arguments that do not fit it
        raise GraphProblem(f"cannot be computed: {' '.join(str(error).split())[:200]}") from None
    finally:
        logger.removeFilter(_nothing)
    if not isinstance(found, torch.Tensor) or found.dtype != torch.float32:
        raise GraphProblem("does not give numbers in float32")


def _nothing(record: logging.LogRecord) -> bool:
    return False
