"""Define the seek methods of read-only files, for readers of blocks and ranges."""

from __future__ import annotations

import io
import os


class PositionedReader(io.RawIOBase):
    """A seekable, readable file of `_size` bytes. `_position` is the next byte. Subclasses define readinto()."""

    _size: int
    _position: int

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position
