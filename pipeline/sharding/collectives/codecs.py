"""Turn CommsConfig into TorchRec's codecs, one pair a collective, and into words for the log.

Pooled embeddings travel by all-to-all (table_wise, column_wise and their kin, between hosts) or by
reduce-scatter (row_wise and its kin, within a host); their gradients come back by all-to-all and all-gather.
Ids and lengths are never quantized, nor is the all-reduce of data_parallel tables and dense layers.
"""

from __future__ import annotations

import torch
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.types import CommOp, QuantizedCommCodecs

from pipeline.config.training import CommsConfig
from pipeline.planner.comms_precisions import check_batch_fits_comms, describe_comms, precisions

__all__ = ["check_batch_fits_comms", "describe_comms", "make_codecs", "precisions"]

COLLECTIVES = {
    "all_to_all": CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL,
    "reduce_scatter": CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER,
}


def make_codecs(comms: CommsConfig) -> dict[str, QuantizedCommCodecs] | None:
    """The registry that TorchRec's sharders take; None when nothing is quantized."""
    registry: dict[str, QuantizedCommCodecs] = {}
    for name, (forward, backward) in precisions(comms).items():
        config = QCommsConfig(forward_precision=CommType(forward), backward_precision=CommType(backward))
        # device="cuda" whatever the device: for "cpu" the registry makes bf16 into fp16, though gloo carries bf16.
        registry |= get_qcomm_codecs_registry(config, [COLLECTIVES[name]], torch.device("cuda")) or {}
    return registry or None
