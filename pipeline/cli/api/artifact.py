"""Score rows in memory with an exported artifact, explain scores, and read its certificate."""

from __future__ import annotations

import threading
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.cli.api.frames import Frame, to_table
from pipeline.cli.api.session import session, torch_threads
from pipeline.config.jobs.evaluate import PredictJob
from pipeline.config.serving import RetrieveConfig, SsdConfig
from pipeline.retraining.find_artifact import find_artifact
from pipeline.runtime.errors import ServingError, check_choice, did_you_mean
from pipeline.runtime.storage.signature import requiring

if TYPE_CHECKING:
    from pipeline.serving.artifact.manifest import Manifest
    from pipeline.serving.scoring.scorer import Scorer


class Artifact:
    """An exported model. `path` is its folder, a link to it, or a registry, whose champion is used.

    memory: "ram", or "ssd" to keep tables on an SSD. compiled: run the compiled layers. deltas:
    apply the published deltas, as a server does, or those up to a number. require_signature: public keys,
    one of which must have signed the artifact. Several threads may use it; rows are scored
    one call after the other. Raises UserError if there is no intact artifact.
    """

    def __init__(
        self,
        path: str,
        *,
        memory: str = "ram",
        compiled: bool = False,
        deltas: bool | int = False,
        require_signature: str | list[str] | None = None,
    ) -> None:
        from pipeline.serving.artifact.manifest import read_manifest

        self.path, self._compiled, self._memory, self._keys = str(path), compiled, memory, require_signature
        self._deltas = deltas
        self._lock = threading.Lock()
        with requiring(require_signature):
            self._folder = find_artifact(self.path).path
            self._manifest: Manifest = read_manifest(self._folder)

    def __repr__(self) -> str:
        return f"Artifact({self.path!r}, version={self.version})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Load it again in another process, for Spark or Ray."""
        options: dict[str, Any] = {"memory": self._memory, "compiled": self._compiled, "deltas": self._deltas}
        options["require_signature"] = self._keys
        return partial(Artifact, **options), (self.path,)

    @property
    def version(self) -> str:
        """Artifacts of equal versions give equal scores."""
        return self._manifest.version

    @property
    def certificate(self) -> dict[str, Any]:
        """What quantization cost: the NE and AUC of each split before and after."""
        return dict(self._manifest.certificate)

    @property
    def labels(self) -> list[str]:
        """The labels whose scores predict() returns; empty if there is one score."""
        return [task.name for task in self._manifest.tasks]

    @property
    def schema(self) -> pa.Schema:
        """The raw columns. Whole numbers are also accepted as text, and numbers of any width."""
        return self._manifest.schema.types

    @cached_property
    def _scorer(self) -> Scorer:
        return self._load(None)

    def _load(self, job: PredictJob | None) -> Scorer:
        from pipeline.serving.scoring.load import load_artifact

        with session(), requiring(self._keys):
            return load_artifact(self._folder, self._memory, SsdConfig(), None, self._compiled, job, self._deltas)

    def predict(self, rows: Frame, *, bad_rows: str = "raise") -> NDArray[np.float32]:
        """Return the score of each row, [rows], or [rows, labels] if the artifact has several labels.

        rows: a pandas or Polars frame, an Arrow table, a DuckDB relation, a list of dicts, or a dict of
        columns. The scores equal those of `python -m pipeline predict` to the bit. Raises ServingError if a
        column is missing, or a row cannot be read; with bad_rows="nan" that row's score is NaN.
        """
        from pipeline.serving.scoring.scorer import refused_rows

        check_choice("bad_rows", bad_rows, ("raise", "nan"))
        if self._manifest.retrieval is not None:
            raise ServingError(f"{self.path} finds items instead of scores: use retrieve()")
        table = to_table(rows)
        with self._lock, torch_threads():
            scored = self._scorer.score(table)
        if bad_rows == "raise" and (refused := refused_rows(scored)):
            raise ServingError(
                f"{len(refused):,} of {table.num_rows:,} rows cannot be scored, the first is row {refused[0].row}: "
                f'{refused[0].reason}; correct it, or give bad_rows="nan"'
            )
        return scored.scores

    def retrieve(self, rows: Frame, *, k: int = 10, vectors: bool = False) -> pa.Table:
        """Return the best `k` items of each row, or with `vectors` the row's vector, of a two-tower's artifact."""
        from pipeline.serving.scoring.scorer import has_scores, output_of

        if self._manifest.retrieval is None:
            raise ServingError(f"{self.path} gives scores and finds no items: use predict()")
        job = PredictJob("", "-", "-.parquet", retrieve=RetrieveConfig(k=k, vectors=vectors))
        scorer, table = self._load(job), to_table(rows)
        with self._lock, torch_threads():
            found = scorer.score(table).scores
        output = output_of(scorer)
        arrays = output.arrays(found, ~has_scores(found))
        return pa.table(list(arrays), schema=pa.schema(output.fields))

    def explain(self, rows: Frame, *, label: str | None = None) -> pa.Table:
        """Return the score of each row, and by how much each column changes it: the score minus the score
        of the row without a value in that column. label: whose score, if there are several labels.
        """
        from pipeline.serving.scoring.scorer import tables_of

        labels = self.labels
        if label is not None and label not in labels:
            raise ServingError(
                f"label={label!r} is not one of {', '.join(labels) or 'one score'}{did_you_mean(label, labels)}"
            )
        table, column = to_table(rows), labels.index(label) if label else 0
        if (tables := tables_of(self._scorer)) is not None:
            table = tables.fill(table)

        def score(masked: pa.Table) -> NDArray[np.float32]:
            return self.predict(masked).reshape(table.num_rows, -1)[:, column]

        scores = score(table)
        columns = {"score": pa.array(scores)}
        for field in self.schema:
            place = table.schema.get_field_index(field.name)
            without = table.set_column(place, field, pa.nulls(table.num_rows, field.type))
            columns[field.name] = pa.array(scores - score(without))
        return pa.table(columns)
