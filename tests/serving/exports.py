"""Export a run with the limits of a few rows, and hold what an artifact scores against what a trainer evaluates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from pipeline.cli.command_line import load_config
from pipeline.config.data import SPLITS, DataConfig, ReaderConfig
from pipeline.config.jobs.evaluate import ExportJob
from pipeline.config.jobs.train import TrainJob
from pipeline.data.dataset import load_dataset
from pipeline.data.raw.layout import layout_of
from pipeline.data.raw.rows import open_source, parse_block
from pipeline.data.raw.source import find_sources
from pipeline.data.read.reader import ShardReader
from pipeline.serving.artifact.export import ExportSummary, export
from pipeline.serving.scoring.predictor import Predictor
from pipeline.serving.scoring.scorer import ColumnLists, JoinedRows, UserItems, as_table, schema_of, with_text


def run_export(run: Path | str, folder: Path, *overrides: str) -> ExportSummary:
    return export(load_config(ExportJob, [f"run={run}", f"output={folder}", *overrides]))


BATCH = 256


def raw_blocks(data: DataConfig, source: str) -> pa.Table:
    """The rows of a raw file as prepare parses them, its bad ones left out."""
    layout, tables = layout_of(data), []
    for one in find_sources(source):
        reader, names = open_source(layout, one, 1 << 20)
        with reader:
            tables += [parse_block(layout, names, block).table for block in reader.blocks()]
    return pa.concat_tables(
        [table.unify_dictionaries() for table in tables], promote_options="permissive"
    ).combine_chunks()


def prepared_batches(job: TrainJob, split: str) -> Iterator[Any]:
    """In the order of the files, padded at the end."""
    reader = ShardReader(
        job.data.path, load_dataset(job.data.path), split, global_batch_size=BATCH, rank=0, world_size=1, seed=0,
        config=ReaderConfig(shuffle="none", num_streams=1), drop_last=False, multi_hot=job.data.synthetic_multi_hot,
    )  # fmt: skip
    yield from reader.batches(epoch=0)


def assert_user_items_score_as_full_rows(predictor: Predictor, rows: pa.Table) -> None:
    """The same bits and counts, however the columns are divided between the user and the items."""
    names = predictor.encoder.raw_names
    rows = as_table(rows).select(names)
    for of_items in (names[::2], names[1::2], names[: len(names) // 3], names):
        of_user = [name for name in names if name not in of_items]
        asked = UserItems(rows.slice(0, 1).select(of_user), rows.select(of_items)) if of_user else None
        if asked is None or not of_items:
            continue
        full = asked.to_table().select(names)
        assert full.num_rows == rows.num_rows
        wanted, found = predictor.score(full), predictor.score(asked)
        assert found.scores.tobytes() == wanted.scores.tobytes(), of_items
        assert found.row_zero == wanted.row_zero
        assert [row.line for row in found.bad_rows] == [row.line for row in wanted.bad_rows]
        lists = [_as_lists(predictor, part) for part in (asked.user, asked.items)]
        as_lists = predictor.score(JoinedRows((rows, UserItems(*lists))))
        joined = predictor.score(pa.concat_tables([rows, full], promote_options="permissive"))
        assert as_lists.scores.tobytes() == joined.scores.tobytes(), of_items


def _as_lists(predictor: Predictor, rows: pa.Table) -> ColumnLists:
    separator = predictor.columns.list_separator
    columns = []
    for name in rows.column_names:
        values = with_text(rows, predictor.columns.sparse)[name].to_pylist()
        if name in predictor.columns.lists:
            values = [value.split(separator) if isinstance(value, str) and value else value or None for value in values]
        columns.append(values)
    return ColumnLists(
        pa.schema([schema_of(predictor.columns).field(name) for name in rows.column_names]), columns, rows.num_rows
    )


def assert_raw_rows_are_prepared_rows(
    artifact: str, job: TrainJob, source: str, same_ids: bool = True, splits: Sequence[str] = SPLITS
) -> int:
    """How many rows of the splits were compared. A pruned artifact's vocabulary lacks the values of rows that it does not
    store, so that its ids are others, and its scores the same."""
    predictor, rows, described = (
        Predictor.load(artifact),
        raw_blocks(job.data, source),
        load_dataset(job.data.path).splits,
    )
    first, compared = 0, 0
    for split in [name for name in SPLITS if described[name].num_rows]:
        if split not in splits:
            first += described[split].num_rows
            continue
        for batch in prepared_batches(job, split):
            count = int((batch.sample_weights > 0).sum())
            raw = rows.slice(first, count)
            encoded, sparse = predictor.encoder.encode(raw), batch.sparse_features
            read = [sparse.keys().index(feature.name) for feature in predictor.encoder.schema.features]
            if len(read) < len(sparse.keys()):  # an artifact has no features that its model does not read
                sparse = sparse.permute(read)
            assert encoded.dense.numpy().tobytes() == batch.dense_features[:count].numpy().tobytes()
            assert not same_ids or torch.equal(encoded.values, sparse.values())  # padding has no ids
            assert encoded.weights is None or torch.equal(encoded.weights, sparse.weights())
            assert (encoded.weights is None) == (sparse.weights_or_none() is None)
            lengths = sparse.lengths().view(-1, BATCH)[:, :count].reshape(-1)
            assert torch.equal(encoded.offsets.diff(), lengths.long())
            if count == BATCH:  # a product of another number of rows may round in another way
                prepared = predictor.score_batch(batch.dense_features, sparse).numpy()
                assert predictor.score(raw).scores.tobytes() == prepared.tobytes()
                if not first:
                    assert_user_items_score_as_full_rows(predictor, raw.slice(0, 64))
            first, compared = first + count, compared + count
    assert first == rows.num_rows
    return compared
