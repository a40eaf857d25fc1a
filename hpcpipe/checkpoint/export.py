"""Writes the model of a set as one safetensors file, for programs that know nothing of hpcpipe.

The format is written here, array by array, because the library's writer wants the whole model in memory and
changes its interface between releases; the file format itself does not change (8-byte little-endian header
length, JSON header padded to 8 bytes, then the tensors without gaps).
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

import numpy as np

from hpcpipe.checkpoint.layout import Entry
from hpcpipe.checkpoint.sets import CheckpointSet, layer_kind
from hpcpipe.durable import named
from hpcpipe.errors import CheckpointError

_KINDS = ("parameters", "buffers")
_DTYPES = {
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "bfloat16": "BF16",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
    "complex64": "C64",
}


def export(checkpoint: CheckpointSet, path: Path) -> int:
    """Write parameters and buffers under the model's own names, `<layer>.<name>`, and return how many there are.

    The file loads with `safetensors.torch.load_file` and `model.load_state_dict`. It appears at `path` only
    when it is whole; an older file there is replaced. One tensor is in memory at a time.

    Raises:
        CheckpointError: a file of the set does not verify, a tensor has no safetensors type, or two one name.
        OSError: the file cannot be written; names it.
    """
    entries = _model_entries(checkpoint)
    header, offsets, length = _header(entries, checkpoint.step)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + length)
            for source, _, array in checkpoint.layer_arrays(_KINDS):
                file.seek(8 + len(header) + offsets[_model_name(source)])
                file.write(array.reshape(-1).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        # What a failing disk says about this is less useful than what it said before.
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise named(error, path) from error
        raise
    return len(entries)


def _model_name(path: str) -> str:
    _, layer, _, *name = path.split("/")
    return f"{layer}.{'.'.join(name)}"


def _model_entries(checkpoint: CheckpointSet) -> dict[str, Entry]:
    """The tensors by model name, from the files' indexes alone."""
    found: dict[str, tuple[str, Entry]] = {}
    for rank in range(checkpoint.ranks):
        for path, entry in checkpoint.index(rank).entries.items():
            if layer_kind(path) not in _KINDS:
                continue
            if entry.dtype not in _DTYPES:
                raise CheckpointError(
                    f"{checkpoint.path}: {path!r} is {entry.dtype}, which safetensors cannot hold"
                )
            if found.setdefault(_model_name(path), (path, entry))[0] != path:
                raise CheckpointError(f"{checkpoint.path}: two tensors would be called {_model_name(path)!r}")
    return {name: entry for name, (_, entry) in found.items()}


def _header(entries: dict[str, Entry], step: int) -> tuple[bytes, dict[str, int], int]:
    """JSON header, each tensor's offset after it, length of all tensors; widest types first, so all align."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", "step": str(step)}}
    offsets = {}
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (-_width(item[1]), item[0])):
        offsets[name] = end
        header[name] = {
            "dtype": _DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [end, end + entry.nbytes],
        }
        end += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8), offsets, end


def _width(entry: Entry) -> int:
    return np.dtype("uint16" if entry.dtype == "bfloat16" else entry.dtype).itemsize
