"""The header that goes before the tensors of every message: a few int64 words that describe it fully.

A receive is posted for `WORDS` words and the sender sends only those in use. The words from `TAIL` on
describe the layout and are the same in every full minibatch, so that both ends compare or look them up as one
string of bytes.

    0 magic | 1 sequence | 2 minibatch | 3 microbatch | 4 control | 5 words in use | 6 kind | 7 ring depth | 8
    state | 9 rows | 10 full rows | 11 slots | per slot: dtype and flags, dimensions ...
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import torch

from hpcpipe.errors import TransportError

MAGIC = 0x68706370_69706531
WORDS = 512
TAIL = 6
MAX_SLOTS = 63
UNKNOWN = -1

_FIXED = 6
_PRESENT = 1 << 8
_GRADIENT = 1 << 9
_NDIM_SHIFT = 16

# The position in this list is the code on the wire: append only.
_DTYPE_NAMES = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "bool",
    "complex64",
    "complex128",
    "complex32",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "uint16",
    "uint32",
    "uint64",
)
_DTYPES: tuple[torch.dtype | None, ...] = tuple(getattr(torch, name, None) for name in _DTYPE_NAMES)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES) if dtype is not None}


class State(IntEnum):
    """Whether the sizes of this message are those of a full minibatch."""

    OPEN = 0
    """Larger messages may still follow: receive the payload only after the header."""
    FULL = 1
    """A full minibatch: receives of this size may be posted ahead from now on."""
    END = 2
    """The last message of a channel; it carries nothing."""


@dataclass(frozen=True, kw_only=True)
class SlotLayout:
    """One tensor of a message as it lies in memory: contiguous, `nbytes` bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool
    nbytes: int

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What the tail of a header says; `rows` and `full_rows` are samples in this and in a full minibatch."""

    kind: int
    depth: int
    state: State
    rows: int | None
    full_rows: int | None
    slots: tuple[SlotLayout | None, ...]

    @cached_property
    def payload_bytes(self) -> int:
        return sum(slot.nbytes for slot in self.slots if slot is not None)

    @cached_property
    def requires_grad(self) -> tuple[bool, ...]:
        return tuple(slot is not None and slot.requires_grad for slot in self.slots)


def slot_layout(dtype: torch.dtype, shape: Sequence[int], requires_grad: bool) -> SlotLayout:
    """The layout of a contiguous tensor. Raises TransportError for a dtype that has no code."""
    if dtype not in _CODES:
        raise TransportError(f"tensors of dtype {dtype} cannot cross a stage boundary: convert them before")
    return SlotLayout(
        dtype=dtype,
        shape=tuple(shape),
        requires_grad=requires_grad,
        nbytes=math.prod(shape) * dtype.itemsize,
    )


def encode_tail(layout: Layout) -> bytes:
    """The tail words of a header. Raises TransportError when they do not fit."""
    if len(layout.slots) > MAX_SLOTS:
        raise TransportError(f"{len(layout.slots)} tensors at one stage boundary: at most {MAX_SLOTS} can cross")
    words = [
        layout.kind,
        layout.depth,
        layout.state,
        UNKNOWN if layout.rows is None else layout.rows,
        UNKNOWN if layout.full_rows is None else layout.full_rows,
        len(layout.slots),
    ]
    for slot in layout.slots:
        if slot is None:
            words.append(0)
            continue
        flags = _PRESENT | (_GRADIENT if slot.requires_grad else 0)
        words.append(_CODES[slot.dtype] | flags | len(slot.shape) << _NDIM_SHIFT)
        words.extend(slot.shape)
    if TAIL + len(words) > WORDS:
        dimensions = sum(len(slot.shape) for slot in layout.slots if slot is not None)
        raise TransportError(
            f"{len(layout.slots)} tensors with {dimensions} dimensions do not fit into a header of {WORDS} words: "
            "send fewer tensors across this stage boundary"
        )
    return struct.pack(f"{len(words)}q", *words)


def decode_tail(tail: bytes) -> Layout:
    """The inverse of `encode_tail`. Raises TransportError when the words make no sense."""
    words = struct.unpack(f"{len(tail) // 8}q", tail)
    try:
        kind, depth, state, rows, full_rows, count = words[:_FIXED]
        slots: list[SlotLayout | None] = []
        at = _FIXED
        for _ in range(count):
            word = words[at]
            ndim = word >> _NDIM_SHIFT
            shape = words[at + 1 : at + 1 + ndim]
            at += 1 + ndim
            if not word & _PRESENT:
                slots.append(None)
                continue
            dtype = _DTYPES[word & 0xFF]
            if dtype is None:
                raise TransportError(
                    f"the other side sends {_DTYPE_NAMES[word & 0xFF]}, which this torch {torch.__version__} lacks"
                )
            slots.append(slot_layout(dtype, shape, bool(word & _GRADIENT)))
        if at != len(words):
            raise ValueError(f"{len(words) - at} words too many")
        return Layout(
            kind=kind,
            depth=depth,
            state=State(state),
            rows=None if rows == UNKNOWN else rows,
            full_rows=None if full_rows == UNKNOWN else full_rows,
            slots=tuple(slots),
        )
    except (IndexError, ValueError) as error:
        raise TransportError(f"a message header that hpcpipe cannot read ({error}): {words[:16]}") from error
