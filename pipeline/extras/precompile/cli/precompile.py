"""Compile the CPU kernels before the first run:  python -m pipeline precompile

Otherwise the first run on a machine takes seconds longer. `make install` and the image call this
command. The compiled kernels are stored next to the modules, or in NUMBA_CACHE_DIR, for this kind of
CPU.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

from pipeline.config.registry import if_installed
from pipeline.sharding.compat import allow_untested_versions


def precompile() -> bool:
    """Run every kernel once on inputs of the types in training and serving.

    Return False without Numba.

    Two processes share the kernels, because compiling uses one thread. Half of the time is for the
    kernels of tables.
    """
    try:
        import numba  # noqa: F401
    except ImportError:
        return False
    with ProcessPoolExecutor(len(GROUPS), multiprocessing.get_context("spawn")) as processes:
        list(processes.map(_compile, range(len(GROUPS))))
    return True


def _compile(group: int) -> None:
    import torch

    allow_untested_versions()  # compiling is safe with any version; training refuses untested ones
    by_threads, once = GROUPS[group]
    # a call on one thread and a region of several threads are compiled separately
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for compile_kernels in by_threads:
            compile_kernels()
    for compile_kernels in once:
        compile_kernels()


def _tables() -> None:
    import torch
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    from pipeline.sharding.torchrec.cpu_tables import speed_up_cpu_tables

    for precision in (SparseType.FP32, SparseType.FP16):
        lookup = SplitTableBatchedEmbeddingBagsCodegen(
            [(4, 16, EmbeddingLocation.HOST, ComputeDevice.CPU)],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            weights_precision=precision,
        )
        speed_up_cpu_tables([lookup])
        for in_bf16 in (False, True):  # rows and gradients
            lookup.forward.follows_autocast = in_bf16
            with torch.autocast("cpu", dtype=torch.bfloat16):
                pooled = lookup(torch.zeros(2, dtype=torch.int64), torch.tensor([0, 1, 2]))
            pooled.sum().backward()


def _first_weights() -> None:
    import torch

    from pipeline.devices.philox import fill_normal, fill_uniform

    for fill in (fill_uniform, fill_normal):
        fill(torch.empty(1), 0, 0, 1.0)


def _replicated_tables() -> None:
    import torch
    from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice

    from pipeline.config.optimizers import SparseOptimizerConfig
    from pipeline.sharding.torchrec.sparse_optimizer import ReplicatedTablesOptimizer

    flat = torch.nn.Parameter(torch.zeros(16))
    flat.grad = torch.ones(16)
    tables: dict[str, torch.nn.Parameter] = {"bags.table.weight": TableBatchedEmbeddingSlice(flat, 0, 16, 4, 4)}
    ReplicatedTablesOptimizer(tables, SparseOptimizerConfig("rowwise_adagrad")).step()


def _dot_products() -> None:
    import torch

    from pipeline.models.layers.interaction import DotInteraction

    inputs = torch.zeros(2, 16, requires_grad=True), torch.zeros(2, 3, 16, requires_grad=True)
    for in_bf16 in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=in_bf16):
            DotInteraction(3)(*inputs).sum().backward()


def _stacks() -> None:
    import torch

    from pipeline.extras.narrow_stacks.stack import speed_up_stacks
    from pipeline.models.layers.mlp import MLP

    stack = MLP(4, [4], out_features=1)
    speed_up_stacks(stack)
    stack(torch.zeros(2, 4, requires_grad=True)).sum().backward()


def _rows_to_score() -> None:
    from pipeline.data.read.value_index import index_values
    from pipeline.serving.artifact.raw_schema import RawFeature, RawSchema
    from pipeline.serving.scoring.raw_rows import RowEncoder

    features = [RawFeature("listed", 2, False), RawFeature("hashed", 2, False, hash_size=2)]
    RowEncoder(RawSchema([], features, "none", "|"), {"listed": index_values([(1, ["a"])])})


def _annealing() -> None:
    import numpy as np

    from pipeline.planner.search.annealing import EVEN_LOADS, Annealing
    from pipeline.planner.search.problem import Assignment, Option, Rule, SearchProblem

    table = [Option(Rule.ANY_RANK, np.ones((1, 1)), np.ones((1, 1)))]
    problem = SearchProblem([table], np.ones((1, 1)), 1)
    Annealing(problem, Assignment([0], [np.zeros(1, dtype=np.int64)]), "max_rank", 0).go(1, 1.0, EVEN_LOADS, 0.0)


def _patterns() -> None:
    import numpy as np

    from pipeline.planner.search.problem import Option, Rule, SearchProblem

    table = [Option(Rule.ANY_RANK, np.ones((1, 1)), np.ones((1, 1)))]
    if prove_bounds := if_installed("prove_bounds"):
        prove_bounds(SearchProblem([table], np.ones((1, 1)), 1), "max_rank", [()], 1, lambda: False)((), 1.5)


Kernels = tuple[Callable[[], None], ...]
# For each process: what is compiled for one thread and for several threads, then the rest.
GROUPS: tuple[tuple[Kernels, Kernels], ...] = (
    ((_tables,), ()),
    ((_first_weights, _dot_products, _stacks), (_replicated_tables, _rows_to_score, _annealing, _patterns)),
)


def main() -> None:
    started = time.monotonic()
    if precompile():
        print(f"CPU kernels compiled in {time.monotonic() - started:.1f} s")
    else:
        print("Numba is not installed: tables and dot products use torch's and FBGEMM's kernels", file=sys.stderr)
