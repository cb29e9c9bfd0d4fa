"""The layers of an artifact as ONNX: onnxruntime gives the artifact's scores, and the certificate says how near."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.evaluate import ExportJob
from pipeline.config.registry import components
from pipeline.embeddings.table import COUNT_COLUMNS
from pipeline.extras.onnx.program import OnnxProgram, onnx_bytes
from pipeline.extras.retrieval.tower_layers import TowerLayers
from pipeline.models.build import build_model
from pipeline.runtime.errors import ConfigError, ServingError
from pipeline.serving.artifact.dense_export import copied_layers, take_collection
from pipeline.serving.artifact.export import ExportSummary, describe
from pipeline.serving.artifact.manifest import read_manifest
from pipeline.serving.scoring.predictor import Predictor
from pipeline.training.run_state import config_of
from tests.extras.models import histories
from tests.extras.models.test_next_item import LENGTH, make_next_item_task
from tests.models.every_model import CLICK_MODELS, DATA, VARIANTS, build, small, tables_of
from tests.models.test_labels import TOWER_MODELS, make, targets_for
from tests.serving.exports import prepared_batches, run_export
from tests.support.made_once import made_once
from tests.support.messages import mentions, names

pytest.importorskip("onnxscript", reason="pip install 'torchrec-pipeline[onnx]'")
onnxruntime = pytest.importorskip("onnxruntime", reason="pip install 'torchrec-pipeline[onnx]'")
LIMITS = ["parity.max_rows=1000", "parity.splits=[validation]", "parity.max_ne_increase=1", "parity.max_auc_decrease=1"]
NEXT_ITEM = ["hstu_retrieval", "sasrec"]
OF_SEQUENCES = {
    kind: histories.READ
    for kind, config in components("model").items()
    if config().sequence_inputs and kind not in NEXT_ITEM
}
OF_SEQUENCES["sequence_encoders"] = {"encoders": {kind: {"kind": kind, **histories.READ} for kind in ("din", "hstu")}}
RETRIEVERS = ["two_tower", *NEXT_ITEM]
FORMS = [(kind, form) for kind in CLICK_MODELS if kind not in OF_SEQUENCES for form in [{}, *VARIANTS.get(kind, [])]]
FORMS += [(kind, {}) for kind in sorted({*TOWER_MODELS, *OF_SEQUENCES, *RETRIEVERS})]
Layers = tuple[nn.Module, int, dict[str, int], int | None]  # num_dense, feature -> width, width of outputs


def _towers_of(kind: str) -> list[Layers]:
    config: Any = components("model")[kind]
    if kind in NEXT_ITEM:
        model, num_dense = make_next_item_task(config())[0].model.eval(), 0
        sides = {"user": ["history"], "item": ["item_id"]}
        keys = ["item_id", "history"]
    else:
        sides = {"user": ["user_id", "hour"], "item": ["item_id", "genre"]}
        given = config(user_features=sides["user"], item_features=sides["item"], log_q_correction=False)
        keys, num_dense = list(DATA["both"][0]), DATA["both"][1]
        model = build_model(given, tables_of(DATA["both"][0]), num_dense).eval()
    dims = dict(zip(keys, take_collection(model, keys), strict=True))
    towers = []
    for tower, features in sides.items():
        own = {name: dims[name] for name in features}
        dense = num_dense if tower == "user" else 0
        layers = TowerLayers(model, tower, [*own], [*own.values()], dense)
        towers.append((layers, dense, own, layers(torch.zeros(2, dense), torch.zeros(2, sum(own.values()))).shape[1]))
    return towers


def _layers_of(kind: str, form: dict[str, Any]) -> list[Layers]:
    """The programs that an export of the model writes."""
    width: int | None = None
    if kind in OF_SEQUENCES:
        data = histories.HistoriesConfig(num_rows=10)
        dataset = histories.generate(data).dataset()
        config = components("model")[kind](**OF_SEQUENCES[kind])
        model = histories.build_task(config, histories.tables_of(config, dataset)).model
        keys, num_dense = dataset.sparse_feature_names, 0
    elif kind in RETRIEVERS:
        return _towers_of(kind)
    elif kind in TOWER_MODELS:
        model, keys, num_dense = make(kind).model, list(DATA["both"][0]), DATA["both"][1]
        width = sum(target.width for target in targets_for(kind))
    else:
        task, tables = build(small(kind, **form))
        keys, num_dense = [feature for table in tables for feature in table.feature_names], DATA["both"][1]
        model = task.model
    model = model.eval()
    return [(model, num_dense, dict(zip(keys, take_collection(model, keys), strict=True)), width)]


@pytest.mark.campaign
def test_every_model_of_the_package_is_converted() -> None:
    ours = {kind for kind, config in components("model").items() if config.__module__.startswith("pipeline.")}
    assert ours == {kind for kind, _ in FORMS}


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        pytest.param(kind, form, id="-".join([kind, *form]), marks=pytest.mark.long if (kind, form) == ("din", {}) else pytest.mark.campaign)
        for kind, form in FORMS
    ],
)  # fmt: skip
def test_onnxruntime_gives_the_outputs_of_each_model(kind: str, form: dict[str, Any]) -> None:
    torch.manual_seed(0)
    for layers, num_dense, features, width in _layers_of(kind, form):
        program = OnnxProgram(onnx_bytes(layers, num_dense, features, width), num_dense, features)
        for rows in (1, 7, 300):
            dense, pooled = torch.randn(rows, num_dense), torch.randn(rows, sum(features.values()))
            if kind in NEXT_ITEM and "history" in features:  # its last columns are the number of items
                pooled[:, -COUNT_COLUMNS:] = torch.tensor([0, 1]) * torch.randint(LENGTH + 1, (rows, 1))
            with torch.no_grad():
                wanted = copied_layers(layers, "fp32", width)(dense, pooled)
            torch.testing.assert_close(program(dense, pooled), wanted, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def exported(small_run: Path, tmp_path_factory: pytest.TempPathFactory) -> ExportSummary:
    def make_artifact(folder: Path) -> ExportSummary:
        return run_export(small_run, folder / "artifact", "onnx=true", "calibration.kind=platt", *LIMITS)

    return made_once(tmp_path_factory, "onnx", make_artifact)


@pytest.mark.long
def test_inputs_have_the_names_of_features_and_scores_are_those_of_the_artifact(
    exported: ExportSummary, small_run: Path
) -> None:
    """Read as another program would: by the names and shapes in the file, from looked up rows."""
    manifest, predictor = read_manifest(exported.artifact), Predictor.load(exported.artifact)
    content = (Path(exported.artifact) / "dense.onnx").read_bytes()
    assert manifest.files["dense.onnx"]["size_bytes"] == len(content)
    assert b"pipeline" not in content and str(Path.cwd()).encode() not in content  # no names of our code, no paths
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    dims = {name: manifest.tables[table].dim for name, table in manifest.features}
    widths = {"dense": len(manifest.schema.dense), **dims}
    assert {each.name: each.shape for each in session.get_inputs()} == {
        name: ["batch", width] for name, width in widths.items()
    }
    job = config_of(str(small_run))
    assert job is not None
    batch = next(prepared_batches(job, "test"))
    sparse = batch.sparse_features
    pooled = predictor.lookup.pooled(sparse.values(), sparse.offsets().long()).split([*dims.values()], dim=1)
    given = dict(zip(widths, [batch.dense_features, *pooled], strict=True))
    (logits,) = session.run(["outputs"], {name: part.numpy() for name, part in given.items()})
    wanted = predictor.outputs(batch.dense_features, sparse).numpy()
    np.testing.assert_allclose(logits, wanted, atol=1e-4)
    assert len(logits) == 256 and logits.std() > 0.1


@pytest.mark.long
def test_the_certificate_and_the_output_say_how_near_the_scores_are(exported: ExportSummary) -> None:
    about = read_manifest(exported.artifact).certificate
    (split,) = about["onnx"]["splits"].values()
    assert split["rows"] == 1000 and 0 <= split["mean_score_difference"] <= split["max_score_difference"] < 1e-5
    assert about["onnx"]["limit"] == 1e-4 and set(about["onnx"]["versions"]) == {"onnx", "onnxruntime", "onnxscript"}
    assert mentions(describe(exported), f"onnxruntime {onnxruntime.__version__} 1,000 rows")
    assert about["calibration"]["kind"] == "platt"  # both additions are in one certificate


@pytest.mark.long
def test_scores_beyond_the_limit_are_refused_and_nothing_is_written(
    small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.extras.onnx.certificate.onnx_bytes", lambda *_: b"")
    monkeypatch.setattr(
        "pipeline.extras.onnx.certificate.OnnxProgram", lambda *_: lambda dense, pooled: dense[:, 0] - 2
    )
    with pytest.raises(ServingError, match=names("onnxruntime validation 0.0001 onnx=true")):
        run_export(small_run, tmp_path / "artifact", "onnx=true", *LIMITS)
    assert list(tmp_path.iterdir()) == []


def test_what_onnx_cannot_have_is_refused(small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (["dense=int8"], ["dense=bf16"]):
        with pytest.raises(ConfigError, match=names("onnx=true fp32 dense=")):
            load_config(ExportJob, [f"run={small_run}", "onnx=true", *words])
    with pytest.raises(ServingError, match=names("'dense' onnx=true")):
        onnx_bytes(nn.Identity(), 3, {"dense": 4}, None)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ServingError, match=names("onnxscript torchrec-pipeline[onnx]")):
        run_export(small_run, tmp_path / "artifact", "onnx=true", *LIMITS)


class _Bessel(nn.Module):
    """Layers with an operator that ONNX does not have."""

    def forward(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        return torch.special.spherical_bessel_j0(dense[:, 0] + pooled[:, 0])


@pytest.mark.long
def test_an_operator_that_onnx_does_not_have_is_named() -> None:
    with pytest.raises(ServingError, match=names("torch.onnx spherical_bessel_j0 onnx=true compiled=true")):
        onnx_bytes(_Bessel(), 3, {"user": 4}, None)
