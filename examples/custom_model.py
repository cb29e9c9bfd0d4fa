"""A model of your own in one file; from the folder above, from nothing to trained:

python -m pipeline generate data=quickstart
python -m pipeline prepare data=quickstart source=datasets/raw/quickstart.tsv
python -m pipeline train data=quickstart plugins=[examples.custom_model] model=gated_mlp model.hidden=64
"""

from dataclasses import dataclass

import torch
from torch import nn

from pipeline.config.model import ModelConfig
from pipeline.config.registry import register
from pipeline.embeddings.collection import build_embeddings


@register("model", "gated_mlp")
@dataclass
class GatedMlpConfig(ModelConfig):
    kind: str = "gated_mlp"
    hidden: int = 32  # model.hidden=64 on the command line

    def build(self, tables, num_dense_features):  # tables.default.embedding_dim is a table's width
        width = num_dense_features + sum(table.embedding_dim * len(table.feature_names) for table in tables)
        names = [name for table in tables for name in table.feature_names]
        return GatedMlp(build_embeddings(tables), names, width, self.hidden)


class GatedMlp(nn.Module):
    def __init__(self, embeddings, names, width, hidden):
        super().__init__()
        self.embeddings, self.names, self.gate = embeddings, names, nn.Linear(width, width)
        self.layers = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, dense_features, sparse_features):  # [batch, num_dense], KeyedJaggedTensor -> logits [batch, 1]
        pooled = self.embeddings(sparse_features)
        inputs = torch.cat([dense_features, *(pooled[name] for name in self.names)], dim=1)
        return self.layers(inputs * torch.sigmoid(self.gate(inputs)))
