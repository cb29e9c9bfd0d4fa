"""Tables on GPUs: first weights, optimizers over variable batches, and fp16 rows of a resumed run."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from pipeline.data.dataset import load_dataset
from pipeline.embeddings.collection import Normal, Uniform
from pipeline.sharding.torchrec.table_init import initialize_tables
from tests.gpu.conftest import Gpus
from tests.gpu.test_checkpoints import stored

LAST = "trainer.max_steps=4"


def _first_weights(rank: int, device: str) -> dict[str, str]:
    """Table -> SHA-256 of its weights."""
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=3001, embedding_dim=12, feature_names=[name], init_fn=init)
        for name, init in (("uniform", Uniform(0.1)), ("normal", Normal(0.02)))
    ]
    tables = EmbeddingBagCollection(configs, device=torch.device(device))
    initialize_tables(tables, seed=7)
    weights = {config.name: tables.embedding_bags[config.name].weight for config in configs}
    return {
        name: hashlib.sha256(weight.detach().cpu().numpy().tobytes()).hexdigest() for name, weight in weights.items()
    }


def test_first_weights_have_the_bits_that_they_have_on_a_cpu(gpus: Gpus) -> None:
    """A real GPU must round float64 roots and logarithms as the CPU does; the shadow computes on the CPU."""
    (on_gpu,), _ = gpus.run(1, _first_weights, "cuda")
    assert [on_gpu] == gpus.run_on_cpu(1, _first_weights, "cpu")


@pytest.mark.parametrize("optimizer", ["adagrad", "rowwise_adagrad"])
def test_bags_that_are_not_sent_reach_fbgemm_padded_where_it_wants_them_equal(
    gpus: Gpus, prepared_clicks: str, tmp_path: Path, optimizer: str
) -> None:
    """FBGEMM ends the first step with an AssertionError for variable batches with Adagrad; row-wise Adagrad takes them."""
    words = [
        "experiment=quickstart",
        f"data.path={prepared_clicks}",
        LAST,
        f"optimizer.sparse.name={optimizer}",
        "tables.default.compression={kind: frequency_split, head_rows: 5, min_rows: 50}",
    ]
    assert gpus.train(2, words, tmp_path / "gpu").summary.step == 4
    assert any("cold" in key for key in stored(tmp_path / "gpu", 4))


def test_a_resumed_run_goes_on_to_the_bit_with_fp16_rows(gpus: Gpus, prepared_clicks: str, tmp_path: Path) -> None:
    """FBGEMM rounds them stochastically by torch's generator of the GPU, whose state is in each step."""
    words = ["experiment=quickstart", f"data.path={prepared_clicks}", "tables.default.data_type=fp16"]
    gpus.train(1, [*words, LAST], tmp_path / "straight")
    gpus.train(1, [*words, "trainer.max_steps=2"], tmp_path / "resumed")
    gpus.train(1, [*words, LAST], tmp_path / "resumed")
    expected, found = stored(tmp_path / "straight", 4), stored(tmp_path / "resumed", 4)
    assert all(torch.equal(found[key], values) for key, values in expected.items())
    assert any(values.dtype == torch.float16 for values in found.values())


def test_each_table_trains_by_its_own_settings_and_frozen_rows_keep_their_bits(
    gpus: Gpus, prepared_clicks: str, tmp_path: Path
) -> None:
    """As on the CPU, for sharded and replicated tables, and after a resume. One table starts from a file."""
    for table in ("cat_3", "cat_24"):
        vocabulary = load_dataset(prepared_clicks).sparse_feature(table).vocabulary
        values = pq.read_table(f"{prepared_clicks}/{vocabulary}")["value"]
        vectors = np.random.default_rng(5).random((len(values), 16), np.float32)
        pq.write_table(pa.table({"value": values, "vector": list(vectors)}), tmp_path / f"{table}.parquet")
    words = [
        "experiment=quickstart",
        f"data.path={prepared_clicks}",
        "tables.cat_2*.frozen=true",
        f"tables.cat_24.init.file={tmp_path / 'cat_24.parquet'}",
        f"tables.cat_3.compression={{kind: vectors, options: {{file: {tmp_path / 'cat_3.parquet'}, width: 16}}}}",
        "tables.cat_20.sharding.sharding_types=[data_parallel]",
        "tables.cat_1.sharding.sharding_types=[data_parallel]",
        "tables.cat_1*.lr_factor=0.1",
        "tables.cat_4.weight_decay=0.5",
        "tables.cat_5.warmup_steps=10",
    ]
    gpus.train(2, [*words, "trainer.max_steps=2"], tmp_path / "gpu")
    half = stored(tmp_path / "gpu", 2)
    gpus.train(2, [*words, LAST], tmp_path / "gpu")
    gpus.train(2, [*words, LAST], tmp_path / "cpu", on="cpu")
    found, expected = stored(tmp_path / "gpu", 4), stored(tmp_path / "cpu", 4)
    frozen = {key for key, values in half.items() if torch.equal(values, found[key]) and key.startswith("model.")}
    tables = {key.split(".")[-2] for key in frozen if "embedding_bags" in key}
    assert tables == {"cat_2", "cat_3__vectors", *(f"cat_{number}" for number in range(20, 26))}
    (rows,) = (values for key, values in found.items() if key.endswith(".cat_24.weight"))
    np.testing.assert_array_equal(rows[1:].numpy(), vectors)
    assert not any(".cat_2." in key or ".cat_20." in key for key in found if key.startswith("optimizer."))
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        if values.is_floating_point():
            torch.testing.assert_close(found[key], values, rtol=1e-4, atol=1e-5, msg=key)
