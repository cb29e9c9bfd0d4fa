"""Save most checkpoints as the rows that changed since the step before (checkpoint.differential), and read them."""

FUNCTIONS = {
    "chain_reader": "pipeline.extras.differential.chain_reader:ChainReader",
    "differential_saves": "pipeline.extras.differential.tracked_rows:differential_saves",
    "packed_file": "pipeline.extras.differential.packed:PackedFile",
    "packed_writer": "pipeline.extras.differential.packed:PackedWriter",
    "rows_changed_since": "pipeline.extras.differential.chain_reader:rows_changed_since",
}
