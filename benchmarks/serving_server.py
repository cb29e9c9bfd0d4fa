"""Run one server of benchmarks/serving.py:  python -m benchmarks.serving_server KIND ROWS [cgroup] -- OVERRIDE ...

KIND: eager (no artifact but its encoder of rows), dictionaries (eager, rows by plain dictionaries), pt2, compiled, ids
(pt2 on categories that are ids), or tiled (pt2, but the encoded user of a request by user is repeated for each item before the
lookups, as TorchEasyRec does). In `cgroup`, where one is given, from the
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
        predictor = (tiled(Predictor) if kind == "tiled" else Predictor).load(
            path, memory=job.memory, cache_bytes=cache_bytes, ssd=job.ssd, compiled=kind == "compiled", verify=False
        )
    if kind == "ids":
        predictor.encoder = IdEncoder(predictor.manifest.schema)
    return predictor


def tiled(predictor):
    """Return a class that repeats the ids and numbers of a user for each item."""
    from itertools import pairwise

    import numpy as np
    import torch

    from pipeline.serving.scoring.predictor import Scored, count_row_zero
    from pipeline.serving.scoring.raw_rows import Bag, join_bags
    from pipeline.serving.scoring.scorer import UserItems, names_of

    def bags(encoded, names, num_rows, times):
        if not names:
            return {}
        values, ends = encoded.values.numpy(), encoded.offsets.numpy()[::num_rows]
        lengths = np.diff(encoded.offsets.numpy()).reshape(len(names), num_rows)
        ids = [values[begin:end] for begin, end in pairwise(ends)]
        return {
            name: Bag(np.tile(own, times), np.tile(count, times))
            for name, own, count in zip(names, ids, lengths, strict=True)
        }

    class Tiled(predictor):
        def score(self, rows):
            if not isinstance(rows, UserItems):
                return super().score(rows)
            division, num_rows = self._user_features._divide(frozenset(names_of(rows.items))), rows.num_rows
            user, items = division.encode(rows)
            found = bags(user, division.user_features, 1, num_rows) | bags(items, division.item_features, num_rows, 1)
            values, offsets, _ = join_bags([found[key] for key in self._keys])
            dense = torch.empty(num_rows, len(self.encoder.schema.dense))
            dense[:, division.user_dense], dense[:, division.item_dense] = user.dense, items.dense
            count_row_zero(values.numpy(), offsets.numpy(), num_rows)
            return Scored(self.score_ids(dense, values, offsets))

    return Tiled


if __name__ == "__main__":
    main()
