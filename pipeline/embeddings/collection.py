"""Turn resolved tables into an EmbeddingBagCollection on the meta device."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from pipeline.embeddings.config import InitConfig, Table

POOLING_TYPES = {"sum": PoolingType.SUM, "mean": PoolingType.MEAN}
DATA_TYPES = {"fp32": DataType.FP32, "fp16": DataType.FP16}


def build_embedding_bag_collection(tables: list[Table], device: torch.device | None = None) -> EmbeddingBagCollection:
    """One EmbeddingBagConfig a table. `device` None: meta, no memory is allocated before sharding.

    The pooled output is a KeyedTensor by feature name; its order of values depends on the plan, so read it by key.
    """
    configs = [
        EmbeddingBagConfig(
            name=table.name,
            num_embeddings=table.num_embeddings,
            embedding_dim=table.embedding_dim,
            feature_names=list(table.feature_names),
            pooling=POOLING_TYPES[table.pooling],
            data_type=DATA_TYPES[table.data_type],
            init_fn=init_function(table.init, table.num_embeddings, table.embedding_dim),
        )
        for table in tables
    ]
    return EmbeddingBagCollection(tables=configs, device=device or torch.device("meta"))


def init_function(init: InitConfig, num_embeddings: int, embedding_dim: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Fills a table's weights in place. The scale follows the whole table, not the shard at hand."""
    if init.kind == "zeros":
        return torch.nn.init.zeros_
    if init.kind == "normal":
        return partial(torch.nn.init.normal_, std=init.scale or 1 / math.sqrt(embedding_dim))
    scale = init.scale or 1 / math.sqrt(num_embeddings)
    return partial(torch.nn.init.uniform_, a=-scale, b=scale)
