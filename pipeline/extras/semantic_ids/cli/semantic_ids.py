"""Compute short codes of items from their vectors:  python -m pipeline semantic_ids vectors=items.parquet output=codes

It writes the codebooks for data.transforms, the codes of each item, and a report of the items that share all codes.
"""

from __future__ import annotations

from pipeline.cli.verb import verb
from pipeline.extras.semantic_ids.config import SemanticIdsJob


def run(job: SemanticIdsJob) -> str:
    from pipeline.extras.semantic_ids.learn import learn

    return learn(job)


main = verb("semantic_ids", SemanticIdsJob, describe=str)(run)
