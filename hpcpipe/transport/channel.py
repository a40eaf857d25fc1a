"""What both ends of a channel over MPI share, and the sending end.

A channel has `depth` ring positions: message n uses position n mod depth, and every position has tags of its
own for the header and each tensor slot. A receive that was posted ahead and stayed unmatched, because the
slot was absent, therefore waits for the next message of its position. Sending never blocks and never waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
from torch import Tensor

from hpcpipe.errors import TransportError
from hpcpipe.transport import header
from hpcpipe.transport.agreement import Agreement, rows_of, state_of
from hpcpipe.transport.buffers import Departure, Memory
from hpcpipe.transport.header import Layout, State
from hpcpipe.transport.message import ChannelId, ChannelStats
from hpcpipe.transport.wait import Request
from hpcpipe.transport.world import PersistentRequest

KNOWN_LAYOUTS = 64
"""Layouts an end remembers; more than a handful come only where every message has another size."""


class Port(Protocol):
    """Point-to-point messages on plain memory; `World` is one."""

    def isend(self, address: int, nbytes: int, rank: int, tag: int) -> Request: ...

    def irecv(self, address: int, nbytes: int, rank: int, tag: int) -> Request: ...

    def recv_init(self, address: int, nbytes: int, rank: int, tag: int) -> PersistentRequest: ...


@dataclass(frozen=True, kw_only=True)
class Wire:
    """How one channel reaches the rank `peer`.

    tags: of the header of each ring position; the tensor in slot i has the tag i + 1 higher.
    chunk_bytes: the most bytes in one MPI message.
    """

    port: Port
    peer: int
    tags: tuple[int, ...]
    chunk_bytes: int

    def pieces(self, nbytes: int, full_bytes: int) -> list[tuple[int, int]]:
        """Offset and length of each MPI message of a tensor: as many as a full one has, so that none is left
        over."""
        return [
            (min(at, nbytes), max(0, min(self.chunk_bytes, nbytes - at)))
            for at in range(0, max(nbytes, full_bytes), self.chunk_bytes)
        ]


class HeaderBuffer:
    """Memory for one header, seen as words and as bytes; `tail` is what its tail was last filled with."""

    __slots__ = ("_array", "address", "bytes", "tail", "words")

    def __init__(self) -> None:
        self._array = np.zeros(header.WORDS, np.int64)
        self.address: int = self._array.ctypes.data
        self.words = memoryview(self._array.data)
        self.bytes = self.words.cast("B")
        self.tail = b""


class Flight:
    """A message on its way: its requests, and the memory that MPI may still read. Itself a request."""

    __slots__ = ("buffer", "departure", "requests")

    def __init__(self, buffer: HeaderBuffer, departure: Departure, requests: list[Request]) -> None:
        self.buffer = buffer
        self.departure = departure
        self.requests = requests

    def Test(self) -> bool:
        requests = self.requests
        while requests:
            if not requests[-1].Test():
                return False
            requests.pop()
        return True


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """How messages of one layout are sent.

    carried: the slots that have bytes.
    pieces: for each MPI message the slot, its place in `carried` (-1 for no bytes), offset and length.
    """

    tail: bytes
    words: int
    carried: tuple[int, ...]
    pieces: tuple[tuple[int, int, int, int], ...]
    payload_bytes: int


class MpiSender:
    """The sending end of a channel to another rank; see `message.Sender`.

    depth: ring positions, the same at both ends.
    full_rows: samples in a full minibatch (microbatch, where the messages are of microbatches). While messages
        with fewer rows come first, the receiver waits for each header; None declares the first message full.
    """

    def __init__(
        self, channel: ChannelId, wire: Wire, memory: Memory, *, depth: int, full_rows: int | None
    ) -> None:
        self.channel = channel
        self.flights: list[Flight] = []
        self._wire = wire
        self._memory = memory
        self._depth = depth
        self._full_rows = full_rows
        self._agreement = Agreement()
        self._plans: dict[object, _Plan] = {}
        self._spare: list[HeaderBuffer] = []
        self._sequence = 0
        self._payload_bytes = 0
        self._ended = False

    @property
    def peer(self) -> int:
        """The rank at the other end."""
        return self._wire.peer

    @property
    def stats(self) -> ChannelStats:
        return ChannelStats(messages=self._sequence - self._ended, payload_bytes=self._payload_bytes)

    def send(
        self,
        tensors: Sequence[Tensor | None],
        *,
        minibatch: int,
        microbatch: int = 0,
        control: int = 0,
        requires_grad: Sequence[bool] | None = None,
        rows: int | None = None,
    ) -> None:
        if self.flights:
            self.progress()
        key = layout_key(tensors, requires_grad, rows)
        plan = self._plans.get(key) or self._admit(key, tensors, requires_grad, rows, minibatch)
        carried = cast("list[Tensor]", [tensors[slot] for slot in plan.carried])
        departure = self._memory.depart(carried)
        self._launch(plan, departure, minibatch, microbatch, control)
        self._payload_bytes += plan.payload_bytes

    def end(self) -> None:
        """Send the last message of this channel."""
        tail = header.encode_tail(
            Layout(
                kind=self.channel.kind,
                depth=self._depth,
                state=State.END,
                rows=None,
                full_rows=self._full_rows,
                slots=(),
            )
        )
        plan = _Plan(tail=tail, words=header.TAIL + len(tail) // 8, carried=(), pieces=(), payload_bytes=0)
        self._launch(plan, Departure([], []), header.UNKNOWN, header.UNKNOWN, 0)
        self._ended = True

    def progress(self) -> None:
        """Test what is on its way and give back the memory of what has arrived."""
        remaining = []
        for flight in self.flights:
            if flight.Test():
                self._memory.departed(flight.departure)
                self._spare.append(flight.buffer)
            else:
                remaining.append(flight)
        self.flights = remaining

    def _launch(self, plan: _Plan, departure: Departure, minibatch: int, microbatch: int, control: int) -> None:
        if self._ended:
            raise TransportError(f"minibatch {minibatch} sent after the end of the {self.channel}")
        buffer = self._spare.pop() if self._spare else HeaderBuffer()
        words = buffer.words
        words[0] = header.MAGIC
        words[1] = self._sequence
        words[2] = minibatch
        words[3] = microbatch
        words[4] = control
        if buffer.tail is not plan.tail:
            words[5] = plan.words
            buffer.bytes[8 * header.TAIL : 8 * plan.words] = plan.tail
            buffer.tail = plan.tail
        wire = self._wire
        isend, peer, tag = wire.port.isend, wire.peer, wire.tags[self._sequence % self._depth]
        requests = [isend(buffer.address, 8 * plan.words, peer, tag)]
        for slot, place, offset, length in plan.pieces:
            address = buffer.address if place < 0 else departure.addresses[place] + offset
            requests.append(isend(address, length, peer, tag + 1 + slot))
        self.flights.append(Flight(buffer, departure, requests))
        self._sequence += 1

    def _admit(
        self,
        key: object,
        tensors: Sequence[Tensor | None],
        requires_grad: Sequence[bool] | None,
        rows: int | None,
        minibatch: int,
    ) -> _Plan:
        layout = layout_of(
            self.channel,
            tensors,
            requires_grad,
            depth=self._depth,
            full_rows=self._full_rows,
            rows=rows,
            minibatch=minibatch,
        )
        if self._agreement.admit(layout, lambda: sending(self.channel, minibatch)):
            self._plans.clear()
        carried = [i for i, slot in enumerate(layout.slots) if slot is not None and slot.nbytes]
        pieces = []
        for index, slot in enumerate(layout.slots):
            if slot is None:
                continue
            full = self._agreement.full[index]
            place = carried.index(index) if slot.nbytes else -1
            for offset, length in self._wire.pieces(slot.nbytes, full.nbytes if full else 0):
                pieces.append((index, place, offset, length))
        tail = header.encode_tail(layout)
        plan = _Plan(
            tail=tail,
            words=header.TAIL + len(tail) // 8,
            carried=tuple(carried),
            pieces=tuple(pieces),
            payload_bytes=layout.payload_bytes,
        )
        if len(self._plans) >= KNOWN_LAYOUTS:
            self._plans.clear()
        self._plans[key] = plan
        return plan


def layout_key(tensors: Sequence[Tensor | None], requires_grad: Sequence[bool] | None, rows: int | None) -> object:
    """Equal for messages with the same layout, and quick to make."""
    if requires_grad is None:
        return (rows, *[t if t is None else (t.shape, t.dtype, t.requires_grad) for t in tensors])
    return (rows, *[t if t is None else (t.shape, t.dtype) for t in tensors], tuple(requires_grad))


def layout_of(
    channel: ChannelId,
    tensors: Sequence[Tensor | None],
    requires_grad: Sequence[bool] | None,
    *,
    depth: int,
    full_rows: int | None,
    rows: int | None,
    minibatch: int,
) -> Layout:
    """The layout of a message that is to be sent. Raises TransportError for what cannot be sent at all."""
    if rows is None:
        rows = rows_of([None if tensor is None else tensor.shape for tensor in tensors])
    elif full_rows is not None and rows > full_rows:
        raise TransportError(
            f"{sending(channel, minibatch)}: {rows} rows are more than the {full_rows} of a full minibatch"
        )
    flags = requires_grad
    if flags is None:
        flags = [tensor is not None and tensor.requires_grad for tensor in tensors]
    try:
        slots = tuple(
            None if tensor is None else header.slot_layout(tensor.dtype, tensor.shape, flag)
            for tensor, flag in zip(tensors, flags, strict=True)
        )
        layout = Layout(
            kind=channel.kind,
            depth=depth,
            state=state_of(rows, full_rows),
            rows=rows,
            full_rows=full_rows,
            slots=slots,
        )
        header.encode_tail(layout)
    except TransportError as error:
        raise TransportError(f"{sending(channel, minibatch)}: {error}") from error
    return layout


def sending(channel: ChannelId, minibatch: int) -> str:
    """The sender and its message in words, for errors."""
    message = f"{channel.kind.word} of minibatch {minibatch}"
    return f"{channel.source_name} sends the {message} to {channel.destination_name}"


def receiving(channel: ChannelId, minibatch: int) -> str:
    """The receiver and its message in words, for errors."""
    message = f"{channel.kind.word} of minibatch {minibatch}"
    return f"{channel.destination_name} receives the {message} from {channel.source_name}"
