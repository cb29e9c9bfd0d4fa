"""Say which models there are: `kind` -> config (stdlib only)."""

from __future__ import annotations

from typing import Dict, Type

from pipeline.models.dlrm_config import DeepFMConfig, DLRMConfig, DLRMDCNConfig
from pipeline.models.linear_config import FMConfig, LogisticRegressionConfig, WideDeepConfig
from pipeline.models.model_config import ModelConfig, used_tables
from pipeline.models.user_item_config import MatrixFactorizationConfig, NCFConfig, TwoTowerConfig

__all__ = [
    "MODEL_CONFIGS",
    "DLRMConfig",
    "DLRMDCNConfig",
    "DeepFMConfig",
    "FMConfig",
    "LogisticRegressionConfig",
    "MatrixFactorizationConfig",
    "ModelConfig",
    "NCFConfig",
    "TwoTowerConfig",
    "WideDeepConfig",
    "used_tables",
]

MODEL_CONFIGS: Dict[str, Type[ModelConfig]] = {
    "dlrm": DLRMConfig,
    "dlrm_dcn": DLRMDCNConfig,
    "deepfm": DeepFMConfig,
    "logistic_regression": LogisticRegressionConfig,
    "fm": FMConfig,
    "wide_deep": WideDeepConfig,
    "matrix_factorization": MatrixFactorizationConfig,
    "ncf": NCFConfig,
    "two_tower": TwoTowerConfig,
}
