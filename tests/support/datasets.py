"""Small Dataset descriptions without files, for tests of what reads only dataset.json."""

from __future__ import annotations

from pipeline.data.dataset import Dataset, FrequencyCurve, SparseFeature, Split


def described_dataset(cardinalities: dict[str, int], num_dense: int = 2, num_rows: int = 1000) -> Dataset:
    """One-hot features with the given cardinalities; `num_rows` training rows, a tenth of it in each other split."""
    return Dataset(
        name="described",
        label="label",
        dense_features=[f"int_{index}" for index in range(num_dense)],
        sparse_features=[
            SparseFeature(name, cardinality, False, 1.0, FrequencyCurve([1, cardinality], [0.5, 1.0]))
            for name, cardinality in cardinalities.items()
        ],
        splits={
            name: Split([], rows, rows // 4)
            for name, rows in {"train": num_rows, "validation": num_rows // 10, "test": num_rows // 10}.items()
        },
        source_rows=num_rows + 2 * (num_rows // 10),
        accepted_rows=num_rows + 2 * (num_rows // 10),
        quarantined_rows=0,
        dense_transform="log1p",
    )
