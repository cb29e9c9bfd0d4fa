"""First weights are Philox's numbers by their place in a table: the same by kernel and by torch, in any part, on any threads."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from pipeline.config.tables import InitConfig
from pipeline.devices import philox
from pipeline.devices.philox import GROUP, KEY_STEPS, LANES, LOW, MULTIPLIERS, fill_normal, fill_uniform
from pipeline.embeddings.collection import Normal, Uniform, init_function
from pipeline.sharding.torchrec.table_init import TablePart, _sample, initialize_tables

KEY = 0x9F1C5A3B_70D2E846
BOTH = pytest.mark.parametrize("fill", [fill_uniform, fill_normal])


def philox_of(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Ten rounds of Philox-4x32 as its paper writes them, in Python's integers."""
    (x0, x1, x2, x3), (a, b) = counter, key
    for _ in range(10):
        p, q = x0 * MULTIPLIERS[0], x2 * MULTIPLIERS[1]
        x0, x1, x2, x3 = (q >> 32) ^ x1 ^ a, q & LOW, (p >> 32) ^ x3 ^ b, p & LOW
        a, b = (a + KEY_STEPS[0]) & LOW, (b + KEY_STEPS[1]) & LOW
    return x0, x1, x2, x3


def test_words_are_those_of_random123s_known_answers() -> None:
    known = {  # kat_vectors of Random123 1.14: counter, key, words
        (0, 0, 0, 0, 0, 0): "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        (LOW,) * 6: "408f276d 41c83b0e a20bc7c6 6d5451fd",
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0): "d16cfe09 94fdcceb 5001e420 24126ea1",
    }
    for numbers, words in known.items():
        assert " ".join(f"{word:08x}" for word in philox_of(numbers[:4], numbers[4:])) == words
    group = 2**33 // LANES + 1
    words = philox._words(KEY, group, 1, torch.device("cpu"))[0]
    for lane in (0, 5, LANES - 1):
        counter = LANES * group + lane
        assert tuple(words[:, lane].tolist()) == philox_of((counter & LOW, counter >> 32, 0, 0), (KEY & LOW, KEY >> 32))


@BOTH
def test_the_kernel_gives_the_bits_of_torchs_operations_in_any_part_and_on_any_threads(
    fill: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(fill)
    first, count, threads = 2**35 + 77, 600 * GROUP + 13, torch.get_num_threads()
    whole, by_torch = torch.empty(count), torch.empty(count)
    try:
        torch.set_num_threads(1)
        fill(whole, KEY, first, 0.3)
        torch.set_num_threads(3)
        again = torch.empty(count)
        fill(again, KEY, first, 0.3)
    finally:
        torch.set_num_threads(threads)
    part = torch.empty(5 * GROUP + 1)
    fill(part, KEY, first + 1001, 0.3)
    assert torch.equal(again, whole) and torch.equal(part, whole[1001 : 1001 + len(part)])
    monkeypatch.setattr(philox, "find_spec", lambda name: None)  # as on a GPU, and without Numba
    fill(by_torch, KEY, first, 0.3)
    assert torch.equal(by_torch, whole)


def test_numbers_are_distributed_as_they_should_and_streams_have_nothing_in_common() -> None:
    n = 1 << 20
    uniform, normal, other = torch.empty(n), torch.empty(n), torch.empty(n)
    fill_uniform(uniform, KEY, 0, 0.25)
    fill_normal(normal, KEY, 0, 2.0)
    fill_normal(other, KEY + 1, 0, 2.0)
    assert uniform.abs().max() <= 0.25 and normal.abs().max() < 2 * 5.9
    ranks = (torch.arange(n) + 0.5) / n
    of_uniform = uniform.double().sort().values / 0.5 + 0.5
    of_normal = torch.special.ndtr(normal.double().sort().values / 2)
    for found in (of_uniform, of_normal):  # Kolmogorov and Smirnov's distance: 1.95 / sqrt(n) has 0.1 %
        assert (found - ranks).abs().max() < 1.95 / math.sqrt(n)
    for one, two in ((normal, other), (normal[:-LANES], normal[LANES:]), (normal[:-1], normal[1:])):
        for power in (1, 2):  # normal numbers of one pair share a radius
            moments = np.corrcoef((one**power).numpy(), (two**power).numpy())
            assert abs(moments[0, 1]) < 5 / math.sqrt(n)


@pytest.mark.parametrize("distribution", [Uniform(0.5), Normal(0.5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_shards_rows_and_columns_are_those_of_the_whole_table(
    distribution: Uniform | Normal, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.sharding.torchrec.table_init.AT_ONCE", 1000)  # several blocks
    config = EmbeddingBagConfig(name="t", num_embeddings=400, embedding_dim=12, feature_names=["f"])
    whole, part = torch.zeros(400, 12), torch.zeros(300, 5, dtype=dtype)
    _sample(TablePart(whole, 0, 0), config, distribution, KEY)
    _sample(TablePart(part, 70, 6), config, distribution, KEY)
    assert whole.std() > 0.2 and torch.equal(part, whole[70:370, 6:11].to(dtype))


def collection(*inits: object) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(name=f"t{i}", num_embeddings=5000, embedding_dim=4, feature_names=[f"f{i}"], init_fn=init)
        for i, init in enumerate(inits)
    ]
    return EmbeddingBagCollection(tables=configs, device=torch.device("cpu"))


def test_each_kind_fills_its_table_and_only_those_named() -> None:
    kinds = [InitConfig("uniform", 0.1), InitConfig("normal", 0.1), InitConfig("xavier_uniform"), InitConfig("zeros")]
    model = collection(*(init_function(init, 5000, 4) for init in kinds), lambda weight: torch.nn.init.normal_(weight))
    tables = list(model.state_dict().values())
    for table in tables:
        table.fill_(7)
    initialize_tables(model, 3, only={"t1", "t3"})
    assert [bool((table == 7).all()) for table in tables] == [True, False, True, False, True]
    initialize_tables(model, 3)
    stds = [float(table.std()) for table in tables[:4]]
    assert stds == pytest.approx([0.1 / math.sqrt(3), 0.1, math.sqrt(2 / 5004), 0], rel=0.03)
    assert abs(float(tables[4].std()) - 1) < 0.02 and len(tables[4].unique(dim=0)) == 5000  # another init_fn: by blocks
    before = [table.clone() for table in tables]
    initialize_tables(model, 4)
    assert [torch.equal(*pair) for pair in zip(before, tables, strict=True)] == [False, False, False, True, False]
