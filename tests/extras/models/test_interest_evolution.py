"""DIEN: both GRUs, the attention between them and the auxiliary loss are those of the paper, row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from pipeline.embeddings.id_splitter import IdSplitter
from pipeline.extras.generate.kinds import HistoriesConfig
from pipeline.extras.models.dien import DIENConfig
from pipeline.extras.models.layers.interest_evolution import InterestEvolution, auxiliary_losses
from tests.extras.models.histories import READ, build_task, generate, share_of_lift, tables_of

Q, K, L, LENGTHS = 3, 5, 4, (4, 2, 0, 1, 3)
MASK = torch.arange(L) < torch.tensor(LENGTHS)[:, None]


def _sigmoid(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-values))


def _step(w: dict[str, np.ndarray], gru: str, x: np.ndarray, h: np.ndarray, attention: float = 1.0) -> np.ndarray:
    in_u, in_r, in_h = np.split(w[f"{gru}.of_input.weight"] @ x + w[f"{gru}.of_input.bias"], 3)
    of_u, of_r, of_h = np.split(w[f"{gru}.of_state.weight"] @ h, 3)
    update = attention * _sigmoid(in_u + of_u)
    return (1 - update) * h + update * np.tanh(in_h + _sigmoid(in_r + of_r) * of_h)


def test_states_attention_and_the_last_state_are_the_papers() -> None:
    torch.manual_seed(0)
    encoder = InterestEvolution(Q, K)
    for weight in encoder.parameters():
        nn.init.normal_(weight)
    target, rows = torch.randn(5, Q), torch.randn(5, L, K)
    weights = {name: weight.detach().double().numpy() for name, weight in encoder.named_parameters()}
    found = encoder(target, rows, MASK).detach().numpy()
    for sample, length in enumerate(LENGTHS):
        states, state = [], np.zeros(K)
        for row in rows[sample, :length].double().numpy():
            state = _step(weights, "extractor", row, state)
            states.append(state)
        scores = np.array([each @ weights["attention.weight"] @ target[sample].double().numpy() for each in states])
        shares, state = np.exp(scores) / np.exp(scores).sum(), np.zeros(K)
        for share, each in zip(shares, states, strict=True):
            state = _step(weights, "evolution", each, state, share)
        np.testing.assert_allclose(found[sample], state, rtol=1e-4, atol=1e-5)
    garbage = torch.where(MASK.unsqueeze(2), rows, torch.full_like(rows, 50.0))
    torch.testing.assert_close(encoder(target, garbage, MASK), encoder(target, rows, MASK))


def test_the_auxiliary_loss_tells_the_next_id_from_the_neighbours() -> None:
    torch.manual_seed(0)
    states, rows = torch.randn(5, L, K), torch.randn(5, L, K)
    rows[1, 1] = rows[0, 1]  # the same id at the same position is no negative
    found, neighbours = auxiliary_losses(states, rows, MASK), (1, 0, 3, 2, None)
    for sample, (length, neighbour) in enumerate(zip(LENGTHS, neighbours, strict=True)):
        total = 0.0
        for t in range(length - 1):
            total -= float(torch.log(torch.sigmoid(states[sample, t] @ rows[sample, t + 1])))
            if (
                neighbour is not None
                and t + 1 < LENGTHS[neighbour]
                and not rows[sample, t + 1].equal(rows[neighbour, t + 1])
            ):
                total -= float(torch.log(1 - torch.sigmoid(states[sample, t] @ rows[neighbour, t + 1])))
        assert float(found[sample]) == pytest.approx(total / max(1, length - 1), rel=1e-4)
    halves = [auxiliary_losses(states[part], rows[part], MASK[part]) for part in (slice(2), slice(2, None))]
    torch.testing.assert_close(torch.cat(halves), found)  # as two ranks compute it


def test_training_adds_the_auxiliary_loss_of_rows_that_count() -> None:
    data = generate(HistoriesConfig(num_rows=64, num_items=60, num_categories=7, max_length=5, num_dwells=3))
    losses = {}
    for weight in (0.0, 0.5):
        config = DIENConfig(**READ, hidden_layer_sizes=[8], activation="relu", auxiliary_weight=weight)
        tables = tables_of(config, data.dataset())
        task, batch = build_task(config, tables), data.batch(slice(64))
        batch.sparse_features = IdSplitter(tables)(batch.sparse_features)
        batch.sample_weights[::3] = 0.0
        losses[weight] = task(batch)[0]
        if weight:
            history = task.model.inputs(task.model.embedding_bag_collection(batch.sparse_features))
            states = task.model.arch.encoder.extractor(history.rows)
            added = (batch.sample_weights * auxiliary_losses(states, history.rows, history.mask)).mean()
            torch.testing.assert_close(losses[0.5], losses[0.0] + 0.5 * added)
            losses[weight].backward()
            assert all(each.grad is not None for each in task.parameters())
            assert task.eval()(batch)[0] < losses[0.5] and config.task == "interest_evolution"


@pytest.mark.campaign
def test_dien_finds_the_planted_teacher() -> None:
    data = HistoriesConfig(num_rows=40_000, num_items=200, num_categories=16, max_length=10)
    assert share_of_lift(DIENConfig(**READ, hidden_layer_sizes=[64, 32]), generate(data), epochs=5) >= 0.9
