"""Score a Spark DataFrame with an artifact, in batches on the executors.

    scored = frame.withColumn("score", score_udf("/shared/artifacts/quickstart")(struct(*columns)))

Executors must see the artifact's folder. `spark.sql.execution.arrow.maxRecordsPerBatch` sets the rows of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
from pyspark.sql.functions import pandas_udf
from pyspark.sql.types import FloatType

from pipeline import Artifact


def score_udf(path: str) -> Any:
    """Return a function of a struct of columns."""

    @pandas_udf(FloatType())
    def score(batches: Iterator[pd.DataFrame]) -> Iterator[pd.Series]:
        artifact = Artifact(path)  # once in each task
        for batch in batches:
            yield pd.Series(artifact.predict(batch))

    return score
