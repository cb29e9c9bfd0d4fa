"""Turn a checkpoint's .metadata into DCP's Metadata without running anything that the file names.

torch.distributed.checkpoint reads .metadata by pickle.load, which calls whatever the file asks for. The metadata of a
model on TorchRec needs a dozen classes: they are listed, all else is refused. So are entries that DCP would read as
pickled values (BytesStorageMetadata): our checkpoints hold tensors alone.
"""

from __future__ import annotations

import pickle
from typing import Any

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

ALLOWED = {
    "pathlib": {"PosixPath"},
    "torch": {"Size", "float16", "bfloat16", "float32", "float64", "uint8", "int8", "int32", "int64", "bool"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
}  # fmt: skip


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint of ours does")
        return super().find_class(module, name)


class TensorsOnlyReader(FileSystemReader):
    """Reads local checkpoints that hold tensors alone. Its errors reach every rank through dcp.load."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Raises pickle.UnpicklingError for a file that is damaged or asks for more than the classes above."""
        with self.fs.create_stream(self.fs.concat_path(self.path, ".metadata"), "rb") as file:
            try:
                metadata = _RestrictedUnpickler(file).load()
            except pickle.UnpicklingError:
                raise
            except Exception as error:  # a damaged pickle may raise anything
                raise pickle.UnpicklingError(f"it is damaged: {error!r}") from None
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}, not Metadata")
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise pickle.UnpicklingError(f"{name} is a {type(entry).__name__}, not a tensor")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
