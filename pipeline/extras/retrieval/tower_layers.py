"""Make a module of one tower of a two-tower. It maps (dense, pooled rows of the tower's features) to vectors."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedTensor

from pipeline.serving.artifact.dense_export import Layers
from pipeline.serving.artifact.reference import Program
from pipeline.serving.artifact.trained_step import TrainedStep


class TowerLayers(nn.Module):
    """The layers of one tower. `model` has the methods user_vectors and item_vectors; parts that
    the tower does not use are removed.
    """

    def __init__(self, model: nn.Module, tower: str, keys: list[str], dims: list[int], num_dense: int) -> None:
        super().__init__()
        self.model, self._tower = copy.deepcopy(model), tower
        self._keys, self._dims = list(keys), list(dims)
        self.num_dense, self.pooled_dim = num_dense, sum(dims)
        self._drop_unused()

    def forward(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        rows = KeyedTensor(keys=self._keys, length_per_key=self._dims, values=pooled)
        vectors: torch.Tensor = getattr(self.model, f"{self._tower}_vectors")(dense, rows)
        return vectors

    def _drop_unused(self) -> None:
        """Remove parts without gradients, because they are unused and would be written into the artifact."""
        self.eval().requires_grad_(True)
        names = [name for name, _ in self.model.named_parameters()]
        # zeros: counts of ids are among the columns. A tower without parameters returns the columns.
        vectors = self(torch.zeros(2, self.num_dense), torch.zeros(2, self.pooled_dim, requires_grad=True))
        gradients = torch.autograd.grad(vectors.sum(), list(self.model.parameters()), allow_unused=True)
        used = {name.partition(".")[0] for name, each in zip(names, gradients, strict=True) if each is not None}
        for name, child in list(self.model.named_children()):
            if name not in used and next(child.parameters(), None) is not None:
                setattr(self.model, name, nn.Identity())
        self.requires_grad_(False)


def towers_of(step: TrainedStep, features: dict[str, list[str]]) -> dict[str, TowerLayers]:
    """Return the layers of the users' and the items' tower, in fp32. features: tower -> its
    features, in the order of the batch. Dense features belong to the users' tower.
    """
    dims = dict(zip(step.keys, step.model_dims, strict=True))
    return {
        tower: TowerLayers(
            step.model, tower, keys, [dims[key] for key in keys], step.num_dense if tower == "user" else 0
        )
        for tower, keys in features.items()
    }


def as_trained(layers: TowerLayers, dim: int, step: TrainedStep) -> Program:
    """Return the tower, (dense, pooled) -> vectors [batch, dim], as the trainer evaluates it."""
    return step.program(Layers(copy.deepcopy(layers), width=dim).eval())
