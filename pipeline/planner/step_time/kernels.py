"""Predict what one operation takes, by a machine's measurements.

Products: products.ProductTimes. Operations that move bytes: by_bytes.Line. Tables, DLRM's products of rows and narrow stacks of layers: a
sum of rates of what they have to do (rates.Rates).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise, product

from pipeline.planner.step_time.by_bytes import NOTHING, OTHERS, Line, bytes_kind, moved_bytes
from pipeline.planner.step_time.layer_kernels import (
    DOTS,
    STACKS,
    amounts_of,
    dots_place,
    recorded_amounts,
    stack_place,
    stack_sizes,
)
from pipeline.planner.step_time.measurements import Measurement, Measurements
from pipeline.planner.step_time.products import Multiplied, ProductTimes
from pipeline.planner.step_time.rates import Rates
from pipeline.planner.step_time.record import PRODUCTS, Operation
from pipeline.planner.step_time.table_work import TableSample, TableWork, table_place, work_of
from pipeline.runtime.errors import ConfigError


class MeasuredTimes:
    """Of one setup of a calibration. Raises ConfigError where it lacks the kinds that a model needs."""

    def __init__(self, measurements: Measurements, setup: str) -> None:
        self._all, self.setup = measurements, setup
        if setup not in measurements.setups:
            raise ConfigError(
                f"calibration {measurements.name!r} has measured {', '.join(measurements.setups)} (ranks x threads) and not "
                f"{setup}; measure it too: python -m pipeline calibrate setups=[{setup}]"
            )

    def _rows(self, kind: str) -> list[Measurement]:
        return self._all.of(kind, self.setup)

    @property
    def threads(self) -> int:
        return int(self.setup.partition("x")[2])

    @property
    def memory_bytes(self) -> float:
        """A rank's share of its host's."""
        return self._all.machine.memory_gib * 2**30 / int(self.setup.partition("x")[0])

    @cached_property
    def _products(self) -> ProductTimes:
        return ProductTimes([row for row in self._all.rows if row.kind in ("gemm", "bmm")])

    @cached_property
    def _by_bytes(self) -> dict[tuple[str, str], Line]:
        groups: dict[tuple[str, str], list[Measurement]] = {}
        for row in self._all.rows:
            if row.setup == self.setup and set(row.shape) == {"dtype", "bytes"}:
                groups.setdefault((row.kind, str(row.shape["dtype"])), []).append(row)
        return {key: Line.through(rows) for key, rows in groups.items()}

    @cached_property
    def _optimizers(self) -> dict[str, dict[float, Line]]:
        """By name, and by the number of tensors measured."""
        groups: dict[str, dict[float, list[Measurement]]] = {}
        for row in self._rows("optimizer"):
            of_name = groups.setdefault(str(row.shape["name"]), {})
            of_name.setdefault(float(row.shape["tensors"]), []).append(row)
        return {
            name: {tensors: Line.through(rows, "numbers") for tensors, rows in of_name.items()}
            for name, of_name in groups.items()
        }

    def _optimizer_us(self, name: str, numbers: float, tensors: float) -> float:
        """Each tensor has a part of its own: a line through the numbers of tensors that were measured, or in proportion to one."""
        lines = self._optimizers.get(name) or self._optimizers.get("adagrad") or next(iter(self._optimizers.values()))
        few, many = min(lines), max(lines)
        least = lines[few].us(numbers)
        if few == many:
            return least
        return max(least / 2, least + (lines[many].us(numbers) - least) * (tensors - few) / (many - few))

    @cached_property
    def _tables(self) -> dict[str, Rates]:
        """Of `lookup` and of `update`: all optimizers together, for most of what an update does is the same under each."""
        found = {}
        for kind in ("lookup", "update"):
            if rows := self._rows(kind):
                found[kind] = Rates.fit([self.amounts_of(row) for row in rows], [row.us for row in rows], table_place)
        return found

    def operation_us(self, operation: Operation) -> float:
        if operation.is_view or operation.name in NOTHING:
            return 0.0
        if operation.name in PRODUCTS:
            return self._product_us(operation)
        if operation.name.startswith("optimizer:"):
            (numbers,), (tensors,) = operation.shapes
            return self._optimizer_us(operation.name.partition(":")[2], numbers, tensors)
        if operation.name in DOTS + STACKS:
            return self._layer_kernel_us(operation)
        kind = operation.name if operation.name == "take" else bytes_kind(operation)
        dtype = operation.dtype if operation.dtype in ("fp32", "bf16") else "fp32"
        lines = self._by_bytes
        line = lines.get((kind, dtype)) or lines.get((OTHERS.get(kind, "add"), dtype)) or lines["add", "fp32"]
        return line.us(moved_bytes(operation, kind))

    def dense_gradient_us(self, num_bytes: float) -> float:
        """Of a replicated table's: zeroed, and looked through for rows that are touched, whose update is counted by update_us."""
        return self.pass_us("fill", num_bytes) + self.pass_us("sum", num_bytes)

    def pass_us(self, kind: str, num_bytes: float) -> float:
        """Of an fp32 operation that reads and writes so many bytes in all; 0 where its kind was not measured."""
        line = self._by_bytes.get((kind, "fp32"))
        return line.us(num_bytes) if line else 0.0

    @cached_property
    def _layer_kernels(self) -> dict[tuple[str, str], Rates]:
        """By kernel and precision."""
        found = {}
        for kind, dtype in product(DOTS + STACKS, ("fp32", "bf16")):
            if rows := [row for row in self._rows(kind) if row.shape["dtype"] == dtype]:
                amounts, times = [amounts_of(row, self.threads) for row in rows], [row.us for row in rows]
                found[kind, dtype] = Rates.fit(amounts, times, dots_place if kind in DOTS else stack_place)
        return found

    def layer_kernel_us(self, row: Measurement) -> float | None:
        """Of a kernel of DOTS or STACKS; None where a calibration of before these kernels has none of them."""
        rates = self._layer_kernels.get((row.kind, str(row.shape["dtype"])))
        return None if rates is None else rates.us(amounts_of(row, self.threads))

    def _layer_kernel_us(self, operation: Operation) -> float:
        rates = self._layer_kernels.get((operation.name, operation.dtype))
        if rates is not None:
            return rates.us(recorded_amounts(operation, self.threads))
        return self._dots_as_products(operation) if operation.name in DOTS else self._stack_as_products(operation)

    def _dots_as_products(self, operation: Operation) -> float:
        batch, rows, dim = operation.shapes[0]
        layout, columns, inner = ("nt", rows, dim) if operation.name == "dots" else ("nn", dim, rows)
        product_us = self.product_us(Multiplied("bmm", layout, operation.dtype), batch, rows, columns, inner)
        take = self._by_bytes.get(("take", operation.dtype))
        return product_us + (take.us(operation.in_bytes + operation.out_bytes) if take else 0.0)

    def _stack_as_products(self, operation: Operation) -> float:
        sizes, batch = stack_sizes(operation)
        dtype, total = operation.dtype, 0.0
        for index, (into, out) in enumerate(pairwise(sizes)):
            if operation.name == "layer_stack":
                total += self.product_us(Multiplied("gemm", "nt", dtype), 1, batch, out, into)
                continue
            total += self.product_us(Multiplied("gemm", "tn", dtype), 1, out, into, batch)
            if index or operation.shapes[-1][0]:
                total += self.product_us(Multiplied("gemm", "nn", dtype), 1, batch, into, out)
        return total

    def _product_us(self, operation: Operation) -> float:
        first, second = operation.shapes[-2:] if len(operation.shapes) > 2 else operation.shapes
        kind = "bmm" if len(first) == 3 else "gemm"
        layout = operation.layout if len(operation.layout) == 2 else "nn"
        dtype = operation.dtype if operation.dtype in ("fp32", "bf16") else "fp32"
        how = Multiplied(kind, layout, dtype, "onednn" if operation.name == "onednn_mm" else "")
        return self.product_us(how, first[0] if kind == "bmm" else 1, first[-2], second[-1], first[-1])

    def product_us(self, how: Multiplied, *sizes: float) -> float:
        """sizes: products, rows, columns, inner."""
        return self._products.us(how, self.setup, *sizes)

    def amounts_of(self, row: Measurement) -> dict[str, float]:
        """Of a measured `lookup` or `update`."""
        sample = TableSample(**json.loads(str(row.shape["sample"])))
        optimizer, number_bytes = str(row.shape["optimizer"]), int(row.shape["number_bytes"])
        work = work_of(sample.shapes, optimizer, number_bytes, self.threads, self.memory_bytes)
        return work.lookup if row.kind == "lookup" else work.update

    def table_us(self, kind: str, amounts: Mapping[str, float]) -> float:
        """Of a `lookup` or `update` whose amounts (TableWork) are given."""
        return self._rates(kind).us(amounts)

    def lookup_us(self, work: TableWork) -> float:
        return self._rates("lookup").us(work.lookup)

    def update_us(self, work: TableWork) -> float:
        return self._rates("update").us(work.update)

    def _rates(self, kind: str) -> Rates:
        if not self._tables:
            raise ConfigError(
                f"calibration {self._all.name!r} has no tables' kernels: was Numba there when it was made?"
            )
        return self._tables[kind]

    def collective_us(self, kind: str, num_bytes: float) -> float | None:
        """None where this collective was not measured."""
        rows = self._rows(kind)
        return Line.through(rows).us(num_bytes) if rows else None
