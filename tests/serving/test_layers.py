"""Every model's layers become a program with plain tensors that gives the model's logits at any batch size."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from pipeline.config.model import used_tables
from pipeline.config.registry import components
from pipeline.config.tables import ConstraintConfig, InitConfig
from pipeline.devices.cpu import products
from pipeline.embeddings.table import Table
from pipeline.models.build import build_model
from pipeline.runtime.errors import ServingError
from pipeline.runtime.storage.signature import requiring
from pipeline.serving.artifact.dense_export import (
    Layers,
    by_name,
    export_layers,
    program_bytes,
    take_collection,
    trace_layers,
)
from pipeline.serving.scoring import dense_program
from pipeline.serving.scoring.dense_program import load_program
from tests.models.every_model import HISTORY_MODELS
from tests.runtime.test_signature import make_keys
from tests.support.messages import names

SETTINGS: dict[str, dict[str, object]] = {
    "dlrm": {"dense_arch_layer_sizes": [16, 8], "over_arch_layer_sizes": [16, 1]},
    "dlrm_dcn": {
        "dense_arch_layer_sizes": [16, 8], "over_arch_layer_sizes": [16, 1], "dcn_num_layers": 2, "dcn_low_rank_dim": 16,
    },
    "ncf": {"user_feature": "f0", "item_feature": "f1"},
    "matrix_factorization": {"user_feature": "f0", "item_feature": "f1"},
}  # fmt: skip
LARGEST = {"fp32": 1e-6, "bf16": 0.05, "int8": 0.1}
# Models of several labels: tests/models/test_labels.py.
SCORING = [
    kind
    for kind, config in components("model").items()
    if kind != "two_tower" and not config().learns_all and not issubclass(config, HISTORY_MODELS)
]
# In fp32 tests/models/test_every_model.py and test_build.py export each of them by default.
CASES = [
    *(pytest.param(kind, "fp32", marks=[] if kind == "ncf" else pytest.mark.campaign) for kind in SCORING),
    ("dlrm_dcn", "bf16"), ("dlrm", "int8"), ("dlrm_dcn", "int8"),
]  # fmt: skip


def _built(kind: str) -> tuple[torch.nn.Module, int]:
    """The model without its collection, and how many columns it takes."""
    tables = [
        Table(f"t{i}", 20, 8, [f"f{i}"], "sum", "fp32", InitConfig(), ConstraintConfig(), [1.0]) for i in range(4)
    ]
    config = components("model")[kind](**SETTINGS.get(kind, {}))
    model = build_model(config, tables, 5)
    keys = [feature for table in used_tables(config, tables) for feature in table.feature_names]
    return model.eval(), sum(take_collection(model, keys))


@pytest.mark.long
@pytest.mark.parametrize(("kind", "precision"), CASES)
def test_a_program_gives_the_models_logits(kind: str, precision: str) -> None:
    model, columns = _built(kind)
    torch.manual_seed(0)
    program = load_program(program_bytes(export_layers(model, precision, 5, columns)), "dense.pt2")
    for batch in (1, 7, 300):
        dense, pooled = torch.rand(batch, 5), torch.randn(batch, columns)
        with torch.no_grad():
            wanted, found = Layers(model)(dense, pooled), program(dense, pooled)
        assert found.shape == (batch,) and found.dtype == torch.float32
        assert (found - wanted).norm() <= LARGEST[precision] * wanted.norm()
        if precision == "int8":
            assert not torch.equal(found, wanted), "nothing was quantized"


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "precision"),
    [("dlrm", "int8"), *(pytest.param(*case, marks=pytest.mark.campaign) for case in [("dlrm_dcn", "bf16"), ("dlrm_dcn", "int8"),
     *((kind, "fp32") for kind in SCORING)])],
)  # fmt: skip
def test_tensors_of_a_later_step_are_found_by_their_names(kind: str, precision: str) -> None:
    model, columns = _built(kind)
    program, int8 = trace_layers(model, precision, 5, columns, None)
    names_of = load_program(program_bytes(program), "dense.pt2").sources
    torch.manual_seed(1)
    with torch.no_grad():
        for value in model.state_dict().values():
            value.add_(torch.rand(value.shape).to(value.dtype))
    later, _ = trace_layers(model, precision, 5, columns, None)
    traced = load_program(program_bytes(later), "dense.pt2").constants
    found = by_name(model, precision, None, names_of, int8)
    for name, one, other in zip(names_of, found, traced, strict=True):
        assert one is None or (one.dtype == other.dtype and torch.equal(one, other)), name
    assert any(one is not None for one in found), "nothing has a name"
    assert bool(int8) == (precision == "int8")


@pytest.mark.campaign
def test_layers_compiled_ahead_of_time_give_the_models_logits(tmp_path) -> None:
    from pipeline.serving.artifact.dense_export import compile_layers
    from pipeline.serving.scoring.dense_program import load_compiled

    model, columns = _built("dlrm")
    compile_layers(export_layers(model, "fp32", 5, columns), str(tmp_path / "dense.compiled.pt2"))
    with requiring(make_keys(tmp_path, "own")[1]):
        program = load_compiled(str(tmp_path / "dense.compiled.pt2"))
    dense, pooled = torch.rand(9, 5), torch.randn(9, columns)
    with torch.no_grad():
        torch.testing.assert_close(program(dense, pooled), Layers(model)(dense, pooled), rtol=1e-5, atol=1e-5)


def test_compiled_layers_are_not_loaded_unless_a_signature_is_required(tmp_path) -> None:
    from pipeline.serving.scoring.dense_program import load_compiled

    with pytest.raises(ServingError, match=names("require_signature sign_key")):
        load_compiled(str(tmp_path / "dense.compiled.pt2"))


def test_without_a_compiler_the_error_says_what_to_do(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.serving.artifact import dense_export

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr("torch._inductor.aoti_compile_and_package", fail)
    with pytest.raises(ServingError, match=names("compiled=true")):
        dense_export.compile_layers(None, str(tmp_path / "x.pt2"))


def test_a_model_without_one_logit_a_row_is_refused() -> None:
    tables = [
        Table(f"t{i}", 20, 8, [f"f{i}"], "sum", "fp32", InitConfig(), ConstraintConfig(), [1.0]) for i in range(2)
    ]
    config = components("model")["two_tower"](user_features=["f0"], item_features=["f1"], log_q_correction=False)
    model = build_model(config, tables, 5).eval()
    columns = sum(take_collection(model, ["f0", "f1"]))
    with pytest.raises(ServingError):
        export_layers(model, "fp32", 5, columns)


def test_layers_are_multiplied_by_onednn_with_their_relu_where_that_is_faster() -> None:
    model, columns = _built("dlrm")
    content = program_bytes(export_layers(model, "fp32", 5, columns))
    inputs = torch.randn(9, 5), torch.randn(9, columns)
    found = []
    for is_faster in (False, True):
        with (
            patch.object(dense_program, "onednn_multiplies_faster", lambda is_faster=is_faster: is_faster),
            patch.object(products, "onednn_multiplies_faster", lambda: True),
            patch.object(products, "MIN_PRODUCTS", 0),
        ):
            program = load_program(content, "dense.pt2")
            found.append((program(*inputs), program.code.count("relu"), program.code.count("linear.default")))
    (plain, relus, linears), (fast, *none) = found
    torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-6)
    assert relus and linears and none == [0, 0]
