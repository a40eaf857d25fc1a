"""Images and labels in the IDX format of MNIST and Fashion-MNIST, gzipped or plain.

Headers and labels are read at once, the images when the first of them is asked for: only the first stage ever
does. Pixels stay bytes in memory and become numbers a minibatch at a time.
"""

from __future__ import annotations

import gzip
import math
import zlib
from functools import cached_property
from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcpipe.config.data import IdxData
from hpcpipe.datasets.order import Index
from hpcpipe.datasets.protocol import DataDescription
from hpcpipe.datasets.rows import Minibatches
from hpcpipe.errors import DataError

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts its files."""
_UNSIGNED_BYTE = 8
_MOST_DIMENSIONS = 4
_BEST_COMPRESSION = 1040
"""Bytes that one byte of a gzip file can stand for; nothing compresses better."""
_COUNTED_AT_ONCE = 4096
"""Images, so that counting pixels takes little memory."""
_REMEDY = "set data.path to a folder with the four IDX files"


class IdxTable:
    """Images and labels of one pair of files. Inputs are float32 (rows, channels, side, side), targets int64.

    Inputs are moved to zero mean and unit variance by the figures of `reference`, or its own without one.
    """

    def __init__(
        self, images: Path, labels: Path, config: IdxData, *, limit: int | None, reference: IdxTable | None = None
    ) -> None:
        self._path = images
        self._channels = config.channels
        self._reference = self if reference is None else reference
        shape = read_shape(images)
        values = read_idx(labels)
        if len(shape) != 3 or values.ndim != 1:
            raise DataError(
                f"data.path: {images} and {labels} have {len(shape)} and {values.ndim} dimensions, not 3 and 1; "
                f"{_REMEDY}"
            )
        if shape[0] != len(values):
            raise DataError(f"data.path: {images} has {shape[0]} images, {labels} {len(values)} labels; {_REMEDY}")
        count = shape[0] if limit is None else min(limit, shape[0])
        self._labels = torch.from_numpy(values[:count].astype(np.int64))
        self.image_shape = (shape[1], shape[2])
        self.padded_shape = self.image_shape if config.size is None else (config.size, config.size)
        if any(padded < side for padded, side in zip(self.padded_shape, self.image_shape, strict=True)):
            text = f"is {config.size}, but the images are {shape[1]} by {shape[2]}"
            raise DataError(f"data.size: {text}; give a size that they fit in")

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._labels)

    @property
    def classes(self) -> int:
        """One more than the largest label; 0 without any."""
        return int(self._labels.max()) + 1 if len(self) else 0

    @cached_property
    def pixels(self) -> NDArray[np.uint8]:
        """The images as stored, (rows, height, width)."""
        return read_idx(self._path)[: len(self)]

    @cached_property
    def figures(self) -> tuple[float, float]:
        """Mean and standard deviation of all pixels in 0 to 1, the black of the padding among them."""
        counts = np.zeros(256, dtype=np.int64)
        for first in range(0, len(self), _COUNTED_AT_ONCE):
            counts += np.bincount(self.pixels[first : first + _COUNTED_AT_ONCE].reshape(-1), minlength=256)
        total = len(self) * math.prod(self.padded_shape)
        counts[0] += total - counts.sum()
        values = np.arange(256) / 255.0
        mean = float((counts * values).sum() / total)
        return mean, math.sqrt(float((counts * (values - mean) ** 2).sum() / total)) or 1.0

    def inputs(self, index: Index, epoch: int) -> tuple[Tensor, ...]:
        """Return padded and normalised images, repeated in every channel."""
        mean, deviation = self._reference.figures
        height, width = self.image_shape
        top, left = (
            (padded - side) // 2 for padded, side in zip(self.padded_shape, self.image_shape, strict=True)
        )
        images = torch.zeros((len(index), 1, *self.padded_shape), dtype=torch.float32)
        images[:, 0, top : top + height, left : left + width] = torch.from_numpy(self.pixels[index])
        images.div_(255.0).sub_(mean).div_(deviation)
        return (images if self._channels == 1 else images.repeat(1, self._channels, 1, 1),)

    def targets(self, index: Index, epoch: int) -> Tensor:
        """Return labels of shape (rows,)."""
        return self._labels[torch.from_numpy(index)]


def build_idx(config: IdxData, seed: int) -> Minibatches:
    """Return the images of a folder as a data set. Raises DataError for a missing, damaged or unfitting file."""
    folder = DEBIAN_FOLDER if config.path is None else Path(config.path)
    if not folder.is_dir():
        hint = (
            "install the Debian package dataset-fashion-mnist, or set data.path to a folder with IDX files"
            if config.path is None
            else _REMEDY
        )
        raise DataError(f"data.path: {folder}: no such folder; {hint}")
    train = IdxTable(*_pair(folder, "train"), config, limit=config.limit)
    held = IdxTable(*_pair(folder, "t10k"), config, limit=config.eval_limit, reference=train)
    if train.image_shape != held.image_shape:
        text = f"training images are {train.image_shape}, test images {held.image_shape}"
        raise DataError(f"data.path: {folder}: {text}; {_REMEDY}")
    description = DataDescription(
        input_shape=(config.channels, *train.padded_shape), classes=max(train.classes, held.classes)
    )
    return Minibatches(train, held, description, config=config, seed=seed)


def read_shape(path: Path) -> tuple[int, ...]:
    """Return the shape that an IDX file's header tells. Raises DataError for a file that is none."""
    with _opened(path) as file:
        return _header(file, path)


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Return the bytes of an IDX file in its shape. Raises DataError for a file that is none, or is cut short."""
    with _opened(path) as file:
        shape = _header(file, path)
        size = math.prod(shape)
        # No memory is asked for that the file cannot fill, whatever its header says.
        most = path.stat().st_size * (_BEST_COMPRESSION if path.suffix == ".gz" else 1)
        body = _read(file, path, min(size, most) + 1)
    if len(body) != size:
        held = f"more than {size}" if len(body) > size else len(body)
        raise DataError(
            f"data.path: {path}: holds {held} bytes of data, but its header says {size}; fetch it again"
        )
    return np.frombuffer(body, dtype=np.uint8).reshape(shape)


def _pair(folder: Path, part: str) -> tuple[Path, Path]:
    return _find(folder, f"{part}-images-idx3-ubyte"), _find(folder, f"{part}-labels-idx1-ubyte")


def _find(folder: Path, name: str) -> Path:
    # Some copies of MNIST spell the suffix with a dot.
    spellings = (name, f"{name}.gz", name.replace("-idx", ".idx"), name.replace("-idx", ".idx") + ".gz")
    for spelling in spellings:
        if (folder / spelling).is_file():
            return folder / spelling
    raise DataError(f"data.path: {folder / name}: no such file, plain or .gz; {_REMEDY}")


def _opened(path: Path) -> IO[bytes] | gzip.GzipFile:
    try:
        return gzip.open(path) if path.suffix == ".gz" else path.open("rb")
    except OSError as error:
        raise DataError(f"data.path: {path}: cannot be read: {error.strerror}") from error


def _header(file: IO[bytes] | gzip.GzipFile, path: Path) -> tuple[int, ...]:
    magic = _read(file, path, 4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] != _UNSIGNED_BYTE:
        raise DataError(f"data.path: {path}: is no IDX file of bytes (it begins with {magic.hex()}); {_REMEDY}")
    if magic[3] > _MOST_DIMENSIONS:
        raise DataError(f"data.path: {path}: has {magic[3]} dimensions; {_REMEDY}")
    sizes = _read(file, path, 4 * magic[3])
    if len(sizes) < 4 * magic[3]:
        raise DataError(f"data.path: {path}: ends within its header; fetch it again")
    return tuple(int.from_bytes(sizes[4 * axis : 4 * axis + 4], "big") for axis in range(magic[3]))


def _read(file: IO[bytes] | gzip.GzipFile, path: Path, size: int) -> bytes:
    try:
        return file.read(size)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"data.path: {path}: cannot be read: {error}; fetch it again") from error
