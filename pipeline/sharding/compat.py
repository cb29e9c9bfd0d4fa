"""Refuse untested versions of torch, torchrec and fbgemm, and list their private names that we use.

TorchRec and FBGEMM may change these names without notice, and the result may be silent: an
attribute that is no longer read, a method that is no longer called. So pipeline.sharding.torchrec
checks the versions when it is imported, and tests/sharding/test_private_names.py checks each name
and its parameters. By default only WRITTEN_FOR is allowed. docs/learn/getting_started.md,
"Versions", lists what runs on torch 2.11 with torchrec 1.6.1. To use other versions, run the tests,
then set sharding.allow_untested_versions=true.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from pipeline.runtime.errors import ShardingError

WRITTEN_FOR = {"torch": "2.14", "torchrec": "1.9", "fbgemm": "1.9"}
# whichever is installed; the other libraries have the name of their distribution
DISTRIBUTIONS = {"fbgemm": ("fbgemm-gpu-cpu", "fbgemm-gpu")}


class VersionError(ShardingError):
    """Report that torch, torchrec or fbgemm is missing or has an unsupported version."""

    code = "version"


_are_untested_allowed = False


def allow_untested_versions() -> None:
    """Allow other versions in this process. Call it before pipeline.sharding.torchrec is imported."""
    global _are_untested_allowed
    _are_untested_allowed = True


def check_versions() -> None:
    """Raise VersionError if a library is missing or has another version than WRITTEN_FOR."""
    for name, wanted in WRITTEN_FOR.items():
        found = _installed(name)
        if found is None:
            raise VersionError(f"{name} is not installed; {_how_to_install()}")
        if not _are_untested_allowed and found.split(".")[:2] != wanted.split("."):
            raise VersionError(
                f"{name} {found} is installed, but sharding uses internals of {name} {wanted}; "
                f"{_how_to_install()}, "
                "or accept silent errors with sharding.allow_untested_versions=true"
            )


def forget_groups() -> None:
    """Forget the groups of a host and between hosts, which TorchRec keeps for the life of a process."""
    if comm := sys.modules.get("torchrec.distributed.comm"):
        comm._INTRA_PG = comm._CROSS_PG = None  # type: ignore[attr-defined]


def _installed(name: str) -> str | None:
    for distribution in DISTRIBUTIONS.get(name, (name,)):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def _how_to_install() -> str:
    torch, torchrec, fbgemm = (f"{wanted}.0" for wanted in WRITTEN_FOR.values())
    return f"install torch=={torch}, fbgemm-gpu-cpu=={fbgemm} (fbgemm-gpu on GPUs) and torchrec=={torchrec} (`make install`)"


@dataclass(frozen=True)
class PrivateName:
    """Describe a private name of a library. owner: "module" or "module:Class".

    parameters: those of the function; None for an attribute. used_by: the files below pipeline/ to
    check if the name changes.
    """

    owner: str
    name: str
    used_by: tuple[str, ...]
    parameters: tuple[str, ...] | None = None


def _names(owner: str, used_by: str, *names: str) -> list[PrivateName]:
    """List attributes of one owner. used_by: files, separated by spaces."""
    return [PrivateName(owner, name, tuple(used_by.split())) for name in names]


def _call(owner: str, used_by: str, name: str, parameters: str) -> PrivateName:
    return PrivateName(owner, name, tuple(used_by.split()), tuple(parameters.split()))


TORCHREC = "torchrec.distributed"
COLLECTION = f"{TORCHREC}.embeddingbag:ShardedEmbeddingBagCollection"
LOOKUP = "fbgemm_gpu.split_table_batched_embeddings_ops_training:SplitTableBatchedEmbeddingBagsCodegen"
MCH = "torchrec.modules.mc_modules:MCHManagedCollisionModule"
AWAITABLE = f"{TORCHREC}.embeddingbag:EmbeddingBagCollectionAwaitable"
SLICE = f"{TORCHREC}.composable.table_batched_embedding_slice:TableBatchedEmbeddingSlice"
ENUMERATOR = f"{TORCHREC}.planner.enumerators:EmbeddingEnumerator"
IN_BACKWARD = "torch.distributed.optim.apply_optimizer_in_backward"
SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor"
SHARDER, CPU_TABLES = "sharding/torchrec/sharder.py", "sharding/torchrec/cpu_tables.py"
MOMENTS = "sharding/torchrec/table_moments.py"
HOST_DISTS, MANAGED = "sharding/host_collectives.py", "extras/managed_collision/managed_tables.py"
CHANGED = "extras/differential/tracked_rows.py"
ORDER, VARIABLE = "sharding/host_collectives.py", "extras/frequency_split/variable_batches.py"
SKIPPED = "sharding/torchrec/fbgemm_lookups.py"
SYNC, ESTIMATOR = "extras/embedding_sync/replicas.py", "planner/estimator.py"
COMMS_WAIT, AVERAGING = "runtime/process/comms_wait.py", "sharding/host_collectives.py"

PRIVATE_NAMES: list[PrivateName] = [
    *_names(f"{TORCHREC}.comm", "sharding/compat.py", "_INTRA_PG", "_CROSS_PG"),
    # FBGEMM's lookup on CPU: the attributes are public by name, but internal.
    *_names(LOOKUP, CPU_TABLES, "weights_host", "weights_offsets", "momentum1_host", "momentum1_offsets", "rows_per_table",
            "D_offsets", "step", "optimizer_args", "use_cpu", "optimizer", "weights_precision",
            "output_dtype", "pooling_mode", "table_names"),
    *_names(LOOKUP, f"{CPU_TABLES} {MOMENTS}", "momentum2_host", "embedding_specs"),
    _call(LOOKUP, MOMENTS, "_apply_split", "self split prefix dtype enforce_hbm make_dev_param dev_reshape uvm_host_mapped "
          "preallocated_host_buffer"),
    *_names(f"{TORCHREC}.batched_embedding_kernel", MOMENTS, "SplitTableBatchedEmbeddingBagsCodegen"),
    _call(LOOKUP, CPU_TABLES, "forward", "self indices offsets per_sample_weights feature_requires_grad batch_size_per_feature_per_rank "
          "total_unique_indices hash_zch_identities hash_zch_runtime_meta vbe_output vbe_output_offsets"),
    _call(LOOKUP, CPU_TABLES, "prepare_inputs", "self indices offsets per_sample_weights batch_size_per_feature_per_rank "
          "force_cast_input_types prefetch_pipeline vbe_output vbe_output_offsets"),
    _call(LOOKUP, CPU_TABLES, "get_learning_rate", "self"),
    *_names(LOOKUP, MOMENTS, "feature_table_map"),
    *_names(LOOKUP, VARIABLE, "use_cpu", "optimizer"),
    _call(LOOKUP, MOMENTS, "split_embedding_weights", "self"),
    _call(LOOKUP, MOMENTS, "split_optimizer_states", "self"),
    # TorchRec's sharded collection.
    *_names(COLLECTION, f"{SHARDER} {HOST_DISTS}", "_input_dists", "_output_dists"),
    *_names(COLLECTION, f"{SHARDER} {CPU_TABLES} {MANAGED} {CHANGED} {SKIPPED}", "_lookups"),
    *_names(COLLECTION, f"{SHARDER} {ORDER}", "_embedding_shardings", "_embedding_dims"),
    *_names(COLLECTION, f"{SHARDER} {ORDER} models/layers/dlrm.py extras/step_time/recorded_layers.py", "_embedding_names"),
    *_names(COLLECTION, f"{ORDER} sharding/torchrec/table_init.py", "_embedding_bag_configs"),
    *_names(COLLECTION, SHARDER, "_env", "_device", "_has_uninitialized_input_dist",
            "_free_features_storage_early", "_has_mean_pooling_callback", "_pooling_type_to_rs_features"),
    *_names(COLLECTION, SHARDER, "_skip_missing_weight_key"),
    _call(COLLECTION, SHARDER, "_pre_load_state_dict_hook", "self state_dict prefix args"),
    _call(COLLECTION, SHARDER, "_create_input_dist", "self input_feature_names"),
    _call(COLLECTION, SHARDER, "init_data_parallel", "self"),
    _call(COLLECTION, SHARDER, "input_dist", "self ctx features"),
    _call(COLLECTION, SHARDER, "compute_and_output_dist", "self ctx input"),
    _call(f"{TORCHREC}.embeddingbag", SHARDER, "_create_mean_pooling_divisor",
          "lengths keys offsets stride stride_per_key dim_per_key pooling_type_to_rs_features embedding_names embedding_dims "
          "variable_batch_per_feature kjt_inverse_order kjt_key_indices kt_key_ordering inverse_indices weights"),
    *_names(AWAITABLE, f"{SHARDER} {ORDER}", "_awaitables"),
    *_names(AWAITABLE, ORDER, "_embedding_dims", "_embedding_names"),
    _call(AWAITABLE, ORDER, "_wait_impl", "self"),
    _call(f"{TORCHREC}.types:Awaitable", f"{COMMS_WAIT} {HOST_DISTS}", "_wait_impl", "self"),
    _call(f"{TORCHREC}.train_pipeline:TrainPipelineSparseDist", SHARDER, "wait_sparse_data_dist", "self context"),
    *_names(f"{TORCHREC}.train_pipeline:TrainPipelineSparseDist", SHARDER, "_pipelined_modules"),
    *_names(f"{TORCHREC}.train_pipeline:TrainPipelineContext", SHARDER, "input_dist_tensors_requests"),
    # autograd nodes, found by the end of their names
    *[PrivateName(f"{TORCHREC}.comm_ops", name, (COMMS_WAIT,))
      for name in ("All2All_Pooled_Req", "Variable_Batch_All2All_Pooled_Req", "ReduceScatterBase_Req", "ReduceScatterV_Req")],
    # The exchanges that host_dists replaces.
    _call(f"{TORCHREC}.dist_data:KJTAllToAll", HOST_DISTS, "forward", "self input"),
    *_names(f"{TORCHREC}.dist_data:KJTAllToAll", HOST_DISTS, "_splits", "_pg"),
    *_names(f"{TORCHREC}.dist_data:KJTAllToAllTensorsAwaitable", HOST_DISTS, "_stride_per_rank"),
    *_names(f"{TORCHREC}.sharding.tw_sharding:TwSparseFeaturesDist", HOST_DISTS, "_dist"),
    *_names(f"{TORCHREC}.sharding.tw_sharding:TwPooledEmbeddingDist", HOST_DISTS, "_dim_sum_per_rank", "_callbacks", "_codecs"),
    *_names(f"{TORCHREC}.sharding.rw_sharding:RwPooledEmbeddingDist", VARIABLE, "_dist", "_pg", "_codecs"),
    _call(f"{TORCHREC}.sharding.rw_sharding:RwPooledEmbeddingDist", VARIABLE, "_create_output_dist_module", "self sharding_ctx"),
    *[each for owner in ("twrw_sharding:TwRwPooledEmbeddingDist", "grid_sharding:GridPooledEmbeddingDist")
      for each in (*_names(f"{TORCHREC}.sharding.{owner}", VARIABLE, "_intra_pg", "_intra_codecs", "_variable_intra_dist"),
                   _call(f"{TORCHREC}.sharding.{owner}", VARIABLE, "_create_output_dist_modules", "self sharding_ctx"))],
    *_names(f"{TORCHREC}.sharding.rw_sharding:RwSparseFeaturesDist", MANAGED, "_feature_block_sizes_tensor", "_world_size"),
    *_names(f"{TORCHREC}.embedding_lookup:GroupedPooledEmbeddingsLookup", f"{VARIABLE} {SKIPPED}", "grouped_configs"),
    *_names(f"{TORCHREC}.embedding_lookup:GroupedPooledEmbeddingsLookup", f"{MANAGED} sharding/table_storage.py {CHANGED} {VARIABLE} {SKIPPED}", "_emb_modules"),
    # the key of a table's kwargs by which TorchRec groups tables into lookups
    *_names(f"{TORCHREC}.embedding_sharding", "sharding/torchrec/sparse_optimizer.py", "_batch_key"),
    # Managed rows: the internals of TorchRec's map.
    *_names(MCH, MANAGED, "_input_history_buffer_size", "_mch_sorted_raw_ids", "_mch_remapped_ids_mapping", "_mch_metadata",
            "_current_iter", "_history_accumulator", "_current_history_buffer_offset", "_history_metadata", "_eviction_policy"),
    _call(MCH, MANAGED, "_match_indices", "self sorted_sequence search_values"),
    _call(MCH, MANAGED, "_coalesce_history", "self"),
    _call(MCH, MANAGED, "_sort_mch_buffers", "self"),
    _call(MCH, MANAGED, "evict", "self"),
    # part of the text of a warning that is filtered out
    *_names("torchrec.sparse.jagged_tensor_validator", MANAGED, "has range"),
    _call("torch.nn:Module", MANAGED, "_register_state_dict_hook", "self hook"),
    _call("torch.nn:Module", MANAGED, "_register_load_state_dict_pre_hook", "self hook with_module"),
    # Replication and gradients.
    _call(f"{TORCHREC}.model_parallel:DefaultDataParallelWrapper", "sharding/torchrec/sharding.py", "_ddp_wrap",
          "self dmp env device ddp_ignore_param_names"),
    *_names(f"{TORCHREC}.model_parallel:DistributedModelParallel", "sharding/torchrec/sharding.py", "_dmp_wrapped_module"),
    *_names(f"{TORCHREC}.model_parallel:DistributedModelParallel", SYNC, "_env"),
    *_names("torch.distributed", AVERAGING, "_broadcast_coalesced"),
    *_names("torch", AVERAGING, "_foreach_copy_"),
    *_names("torch", "sharding/torchrec/sparse_optimizer.py", "_foreach_add_"),
    *_names("torch.autograd:Variable", f"{AVERAGING} {COMMS_WAIT}", "_execution_engine"),
    *_names(SLICE, "sharding/torchrec/flat_update.py", "_original_tensor", "_start_offset", "_end_offset"),
    *_names(f"{TORCHREC}.types:ShardingEnv2D", SYNC, "output_dtensor"),
    # Optimizers on parameters.
    _call("torch.distributed.optim", "sharding/torchrec/sparse_optimizer.py", "_apply_optimizer_in_backward",
          "optimizer_class params optimizer_kwargs register_hook"),
    *_names(IN_BACKWARD, f"{SHARDER} sharding/torchrec/sharding_checks.py sharding/torchrec/sparse_optimizer.py", "_optimizer_kwargs"),
    *_names(IN_BACKWARD, f"{ESTIMATOR} sharding/torchrec/sharding_checks.py sharding/torchrec/sparse_optimizer.py",
            "_optimizer_classes"),
    # ShardedTensor and torch.distributed.checkpoint.
    *_names(SHARDED_TENSOR, f"{SYNC} {MANAGED} sharding/torchrec/table_init.py extras/differential/links.py extras/embedding_sync/state.py checkpoint/tables.py "
            f"checkpoint/reshard.py {SHARDER}",
            "Shard", "ShardedTensor"),
    _call(f"{SHARDED_TENSOR}:ShardedTensor", MANAGED, "_init_from_local_shards", "local_shards global_size process_group init_rrefs"),
    _call(f"{SHARDED_TENSOR}:ShardedTensor", SYNC, "_init_from_local_shards_and_global_metadata",
          "local_shards sharded_tensor_metadata process_group init_rrefs sharding_spec"),
    *_names(f"{SHARDED_TENSOR}:ShardedTensor", SYNC, "_process_group"),
    *_names("torch.distributed._shard.metadata", MANAGED, "ShardMetadata"),
    *_names("torch.distributed._shard.sharding_spec", "planner/plan_codec.py", "EnumerableShardingSpec", "ShardMetadata"),
    *_names("torch.distributed.remote_device", SYNC, "_remote_device"),
    *_names("torch.distributed.checkpoint.filesystem", "checkpoint/shards.py checkpoint/metadata_pickle.py", "_StorageInfo"),
    *_names("torch.distributed.checkpoint.metadata", "checkpoint/metadata_pickle.py", "_MEM_FORMAT_ENCODING"),
    *_names("torch._subclasses.fake_tensor", "extras/step_time/recorded_layers.py serving/scoring/program_graph.py",
            "FakeTensorMode"),
    *_names("torch.utils._python_dispatch", "extras/step_time/recorded_layers.py", "TorchDispatchMode"),
    *_names("torch.nn:Module", "extras/step_time/recorded_layers.py", "_parameters", "_buffers"),
    *_names("torch.nn:Module", "extras/narrow_stacks/stack.py", "_parameters", "_forward_hooks"),
    *_names("torch:Tensor", "checkpoint/stored_rows.py", "_make_wrapper_subclass"),
    # TorchRec's planner.
    *_names(f"{TORCHREC}.planner.planners:EmbeddingShardingPlanner", "planner/planner.py", "_best_plan"),
    *_names(ENUMERATOR, ESTIMATOR, "_last_stored_module", "_compute_device"),
    _call(ENUMERATOR, ESTIMATOR, "populate_estimates", "self sharding_options"),
    # Layers.
    *_names("torchrec.modules.mlp:Perceptron", "models/layers/dlrm.py extras/narrow_stacks/stack.py", "_activation_fn"),
    *_names("torchrec.modules.mlp:Perceptron", "extras/narrow_stacks/stack.py", "_linear"),
    *_names("torch.ops:mkldnn", "devices/cpu/products.py", "_linear_pointwise"),
    *_names("torchrec.modules.mlp:MLP", "models/layers/dlrm.py extras/narrow_stacks/stack.py", "_mlp"),
]  # fmt: skip
