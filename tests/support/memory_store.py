"""An object store in memory, for code that must not rely on renames and folders."""

from __future__ import annotations

import io
from pathlib import Path
from typing import IO, Any

from iopath.common.file_io import PathHandler


class ObjectStore(PathHandler):
    """test://bucket/key in memory, with the ways of iopath's S3 handler: flat keys, `ls` gives whole keys."""

    _strict_kwargs_check = False

    def __init__(self, cache: Path) -> None:
        super().__init__()
        self.cache = cache
        self.objects: dict[str, bytes] = {}

    def _get_supported_prefixes(self) -> list[str]:
        return ["test://"]

    def _key(self, path: str) -> str:
        return path.removeprefix("test://bucket/")

    def _open(self, path: str, mode: str = "r", buffering: int = -1, **kwargs: Any) -> IO[Any]:
        key, objects = self._key(path), self.objects
        if "r" in mode:
            file: IO[Any] = io.BytesIO(objects[key])
            return file if "b" in mode else io.TextIOWrapper(file, encoding="utf-8", newline="")

        class Upload(io.BytesIO):
            def close(self) -> None:
                if not self.closed:
                    objects[key] = self.getvalue()
                super().close()

        return Upload() if "b" in mode else io.TextIOWrapper(Upload(), encoding="utf-8", newline="")

    def _exists(self, path: str, **kwargs: Any) -> bool:
        return self._key(path) in self.objects

    _isfile = _exists

    def _ls(self, path: str, **kwargs: Any) -> list[str]:
        prefix = self._key(path)
        below = [key for key in self.objects if key.startswith(prefix)]
        return sorted({prefix + "".join(key.removeprefix(prefix).partition("/")[:2]) for key in below})

    def _rm(self, path: str, **kwargs: Any) -> None:
        del self.objects[self._key(path)]

    def _get_local_path(self, path: str, force: bool = False, **kwargs: Any) -> str:
        (self.cache / "cached").write_bytes(self.objects[self._key(path)])
        return str(self.cache / "cached")

    def _copy_from_local(self, local_path: str, dst_path: str, overwrite: bool = False, **kwargs: Any) -> bool:
        self.objects[self._key(dst_path)] = Path(local_path).read_bytes()
        return True
