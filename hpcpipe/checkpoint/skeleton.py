"""A file in memory for the HDF5 library to put its own structure into, while the arrays go to disk directly.

HDF5 gives out offsets for contiguous datasets without touching them. So the library lays the file out here, in
pages that exist only where it wrote, and the writer moves the data itself: no copy through HDF5, none of its
locks held for long, and a full disk is an ordinary error of our own write instead of a half-dead library
handle.
"""

from __future__ import annotations

import io

_PAGE = 4096


class Skeleton:
    """A sparse binary file with what h5py's file-object driver calls; what was never written reads as zeros."""

    def __init__(self) -> None:
        self.length = 0
        self._position = 0
        self._pages: dict[int, bytearray] = {}

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.length}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(self.length - self._position, 0)
        data = self.read_at(self._position, left if size < 0 else min(size, left))
        self._position += len(data)
        return data

    def readinto(self, buffer: memoryview) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read(view.nbytes)
        view[: len(data)] = data
        return len(data)

    def write(self, data: memoryview | bytes) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < view.nbytes:
            number, start = divmod(self._position + done, _PAGE)
            part = view[done : done + _PAGE - start]
            self._pages.setdefault(number, bytearray(_PAGE))[start : start + part.nbytes] = part
            done += part.nbytes
        self._position += done
        self.length = max(self.length, self._position)
        return done

    def truncate(self, size: int | None = None) -> int:
        self.length = self._position if size is None else size
        return self.length

    def flush(self) -> None:
        """Nothing lies between this object and its pages."""

    def read_at(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`, whatever the length is."""
        pieces = []
        while size > 0:
            number, start = divmod(offset, _PAGE)
            count = min(size, _PAGE - start)
            page = self._pages.get(number)
            pieces.append(bytes(count) if page is None else bytes(page[start : start + count]))
            offset, size = offset + count, size - count
        return b"".join(pieces)
