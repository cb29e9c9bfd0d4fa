"""Optimizers with which a few steps of a tiny model move its weights far."""

from __future__ import annotations

from pipeline.config.optimizers import DenseOptimizerConfig, OptimizerConfig, SparseOptimizerConfig

SGD = OptimizerConfig(SparseOptimizerConfig("sgd", lr=8.0), DenseOptimizerConfig("adam", lr=0.01))
ROWWISE = OptimizerConfig(SparseOptimizerConfig("rowwise_adagrad", lr=0.1), DenseOptimizerConfig("adam", lr=0.01))
