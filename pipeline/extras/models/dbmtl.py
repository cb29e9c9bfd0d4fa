"""Define DBMTL: labels that depend on other labels, and pass on what they learnt (stdlib only; layers
import torch).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

from pipeline.config.registry import register
from pipeline.data.targets import heads_of
from pipeline.extras.models.towers import TowersConfig
from pipeline.models.checks import check_layer_sizes
from pipeline.runtime.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from torch import nn

    from pipeline.data.targets import Target


@register("model", "dbmtl")
@dataclass
class DBMTLConfig(TowersConfig):
    """Configure deep Bayesian multi-target learning (arXiv 1902.09154).

    P(all labels | x) is the product of P(label | the labels that it depends on, x). Layers that
    labels share are followed by separate layers for each label. The relation layers of a label
    read its separate layers and the relation layers of each label that it depends on.

    depends_on: for a label, the labels that it depends on; labels without an entry depend on none.
    None: a label depends on all labels before it in data.columns.labels.
    """

    kind: str = "dbmtl"
    hidden_layer_sizes: list[int] = field(default_factory=lambda: [256])
    own_layer_sizes: list[int] = field(default_factory=lambda: [128])
    relation_layer_sizes: list[int] = field(default_factory=lambda: [64])
    tower_layer_sizes: list[int] = field(default_factory=list)
    depends_on: dict[str, list[str]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_sizes("model.hidden_layer_sizes", self.hidden_layer_sizes, least=0)
        check_layer_sizes("model.own_layer_sizes", self.own_layer_sizes)
        check_layer_sizes("model.relation_layer_sizes", self.relation_layer_sizes)
        try:
            TopologicalSorter(self.depends_on or {}).prepare()
        except CycleError as error:
            raise ConfigError(
                f"model.depends_on goes round in a circle ({' -> '.join(error.args[1])}); remove one of these dependencies"
            ) from None

    def check_targets(self, targets: list[Target]) -> None:
        super().check_targets(targets)
        names = [target.name for target in heads_of(targets)]
        for label, others in (self.depends_on or {}).items():
            for name in (label, *others):
                if name not in names:
                    raise ConfigError(
                        f"model.depends_on names {name!r}, which is not a label{did_you_mean(name, names)}; there are "
                        f"{', '.join(names)}"
                    )

    def build_body(self, width: int, targets: list[Target]) -> tuple[nn.Module, int]:
        from pipeline.extras.models.layers.dependent_labels import DependentLabels
        from pipeline.models.layers.mlp import MLP

        names, settings = [target.name for target in targets], self.layer_settings
        parents = {name: names[:number] for number, name in enumerate(names)}
        if self.depends_on is not None:
            parents = {name: list(dict.fromkeys(self.depends_on.get(name, []))) for name in names}
        shared = MLP(width, self.hidden_layer_sizes, settings)
        own = [MLP(shared.out_features, self.own_layer_sizes, settings) for _ in names]
        size = self.relation_layer_sizes[-1]
        relations = [
            MLP(self.own_layer_sizes[-1] + len(parents[name]) * size, self.relation_layer_sizes, settings)
            for name in names
        ]
        order = [names.index(name) for name in TopologicalSorter(parents).static_order()]
        numbers = [[names.index(each) for each in parents[name]] for name in names]
        return DependentLabels(shared, own, relations, numbers, order), size
