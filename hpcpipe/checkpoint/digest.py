"""Fingerprints of what training has reached: equal for equal weights, buffers, optimizer state and step.

It leaves out what only the plan decides (which rank holds a layer, what is in flight), so two runs on different
numbers of ranks can be compared.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np

from hpcpipe.checkpoint.sets import CheckpointSet

KINDS = ("parameters", "buffers", "optimizer")


class Digest(NamedTuple):
    """SHA-256 of the bytes of each tensor by path, sorted; and one over step and all of these, in hexadecimal."""

    tensors: dict[str, str]
    overall: str


def digest(checkpoint: CheckpointSet) -> Digest:
    """Digest of a set, every file verified on the way; reads one tensor at a time.

    Raises:
        CheckpointError: a file does not verify.
    """
    lines = {}
    tensors = {}
    for path, entry, array in checkpoint.layer_arrays(KINDS):
        content = hashlib.sha256(array.reshape(-1).view(np.uint8).data).hexdigest()
        tensors[path] = content
        lines[path] = f"{path} {entry.dtype} {list(entry.shape)} {content}\n"
    overall = hashlib.sha256(f"step {checkpoint.step}\n".encode())
    for path in sorted(lines):
        overall.update(lines[path].encode())
    return Digest(dict(sorted(tensors.items())), overall.hexdigest())
