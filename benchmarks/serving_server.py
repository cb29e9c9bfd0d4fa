"""Run one server of benchmarks/serving.py:  python -m benchmarks.serving_server KIND ROWS [cgroup] -- OVERRIDE ...

KIND: eager (no artifact but its encoder of rows), dictionaries (eager, rows by plain dictionaries), pt2, compiled, or ids
(pt2 on categories that are ids). In `cgroup`, where one is given, from the
first allocation on.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    if len(sys.argv) < 4:
        print(__doc__)
        return
    kind, rows, *rest = sys.argv[1:]
    cgroup = rest[0] if rest[0] != "--" else ""
    overrides = rest[rest.index("--") + 1 :]
    if cgroup:
        (Path(cgroup) / "cgroup.procs").write_text(str(os.getpid()))
    from pipeline.cli.verb import Verb
    from pipeline.config.jobs.evaluate import ServeJob
    from pipeline.serving.http.serve import serve

    sys.argv[1:] = overrides
    Verb(ServeJob, lambda job: serve(job, lambda found: _load(kind, int(rows), found.path, job)), "").main()


def _load(kind: str, rows: int, path: str, job):
    import pyarrow as pa
    import torch

    from benchmarks.serving_artifacts import COLUMNS, DictEncoder, Eager, IdEncoder, Shape, public_key
    from pipeline.runtime.storage.signature import requiring
    from pipeline.serving.artifact.manifest import read_manifest
    from pipeline.serving.scoring.predictor import Predictor, Scored
    from pipeline.serving.scoring.raw_rows import RowEncoder
    from pipeline.serving.scoring.scorer import ColumnLists

    torch.set_num_threads(job.threads or 1)
    if kind in ("eager", "dictionaries"):
        manifest = read_manifest(path)
        listed = {name: pa.ipc.open_file(f"{path}/{file}").read_all() for name, file in manifest.vocabularies.items()}
        model, encoder = Eager(Shape(rows)), RowEncoder(manifest.schema, listed)
        by_dictionaries = DictEncoder(Shape(rows)) if kind == "dictionaries" else encoder

        class EagerScorer:
            version, columns, tasks = "eager", COLUMNS, ()

            def score(self, asked):
                is_json = isinstance(asked, ColumnLists)  # all but the rows that the server tries a model by
                encoded = (by_dictionaries if is_json else encoder).encode(asked)
                return Scored(model(encoded.dense, encoded.values, encoded.offsets).numpy(), encoded.bad_rows)

        return EagerScorer()
    gb = job.ssd.cache_gb
    cache_bytes = None if gb is None else int(gb * 2**30)
    # Not verified: what the checksums cost is no part of serving, and reading the tables would fill the page cache.
    with requiring(public_key(path) if kind == "compiled" else None):
        predictor = Predictor.load(
            path, memory=job.memory, cache_bytes=cache_bytes, ssd=job.ssd, compiled=kind == "compiled", verify=False
        )
    if kind == "ids":
        predictor.encoder = IdEncoder(predictor.manifest.schema)
    return predictor


if __name__ == "__main__":
    main()
