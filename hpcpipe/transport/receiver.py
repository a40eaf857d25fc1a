"""The receiving end of a channel over MPI: a ring of positions whose receives are posted ahead.

The receive for the header of every free position is always posted. The receives for its tensors are posted
with it once the sizes of a full minibatch are agreed; until then they follow the header. All of these are
persistent requests on fixed memory. A position is posted again only when nobody reads its memory any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

from torch import Tensor

from hpcpipe.errors import TransportError
from hpcpipe.transport import header
from hpcpipe.transport.agreement import Agreement
from hpcpipe.transport.buffers import Event, Landing, Memory
from hpcpipe.transport.channel import KNOWN_LAYOUTS, HeaderBuffer, Wire, receiving
from hpcpipe.transport.header import Layout, SlotLayout, State
from hpcpipe.transport.message import ChannelId, ChannelStats, Message
from hpcpipe.transport.wait import PATIENT_YIELDING_S, Condition, Request, Waiter, done_soon
from hpcpipe.transport.world import PersistentRequest


class _Stage(Enum):
    """The life of a ring position: its header is posted, the engine holds its memory, or both ends let go of
    it."""

    POSTED = 0
    HELD = 1
    RELEASED = 2


class _Slot:
    """The memory of one tensor slot of one position, and the receives posted for it, one per piece."""

    __slots__ = ("landing", "posted", "requests")

    def __init__(self) -> None:
        self.landing: Landing | None = None
        self.requests: list[PersistentRequest] = []
        self.posted = False


class _Position:
    """One place of the ring. `agreed` is the state of the agreement that its receives were made for."""

    __slots__ = ("agreed", "buffer", "fence", "request", "slots", "stage")

    def __init__(self, buffer: HeaderBuffer, request: PersistentRequest) -> None:
        self.buffer = buffer
        self.request = request
        self.slots: list[_Slot] = []
        self.stage = _Stage.RELEASED
        self.fence: Event | None = None
        self.agreed: object = None


class MpiReceiver:
    """The receiving end of a channel from another rank; see `message.Receiver`.

    depth: ring positions, the same at both ends: the most messages that are held at once.
    being_sent: whether a send of this rank still reads memory in a range of addresses: a stage that passes its
        input on unchanged sends from the memory of the ring.
    takers: the ranks that such sends are for.
    """

    def __init__(
        self,
        channel: ChannelId,
        wire: Wire,
        memory: Memory,
        waiter: Waiter,
        *,
        depth: int,
        being_sent: Callable[[int, int], bool],
        takers: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        self.channel = channel
        self._wire = wire
        self._memory = memory
        self._waiter = waiter
        self._depth = depth
        self._being_sent = being_sent
        self._takers = takers
        self._agreement = Agreement()
        self._agreed: object = None
        self._layouts: dict[bytes, Layout] = {}
        self._sequence = 0
        self._payload_bytes = 0
        self._released: list[_Position] = []
        self._ring: list[_Position] = []
        for tag in wire.tags:
            buffer = HeaderBuffer()
            request = wire.port.recv_init(buffer.address, 8 * header.WORDS, wire.peer, tag)
            self._ring.append(_Position(buffer, request))
        for position in self._ring:
            self._post(position)

    @property
    def stats(self) -> ChannelStats:
        return ChannelStats(messages=self._sequence, payload_bytes=self._payload_bytes)

    def receive(self, *, minibatch: int, microbatch: int = 0) -> Message:
        ticket = self._sequence % self._depth
        position = self._ring[ticket]
        if position.stage is not _Stage.POSTED or not position.request.Test():
            self._await_header(position, minibatch)
        words = position.buffer.words
        layout = self._read(position, minibatch)
        if layout.state is State.END:
            raise TransportError(f"{receiving(self.channel, minibatch)}: the channel has ended")
        if words[2] != minibatch or words[3] != microbatch:
            raise TransportError(
                f"{receiving(self.channel, minibatch)}: expected microbatch {microbatch} of minibatch "
                f"{minibatch}, got microbatch {words[3]} of minibatch {words[2]}"
            )
        tensors = self._collect(position, layout, minibatch)
        position.stage = _Stage.HELD
        self._sequence += 1
        self._payload_bytes += layout.payload_bytes
        return Message(
            tensors=tensors,
            requires_grad=layout.requires_grad,
            control=words[4],
            minibatch=minibatch,
            microbatch=microbatch,
            ticket=ticket,
        )

    def release(self, message: Message) -> None:
        if message.ticket < 0:
            raise TransportError(f"{receiving(self.channel, message.minibatch)}: released twice")
        position = self._ring[message.ticket]
        message.ticket = -1
        message.tensors = ()
        self._let_go(position)

    def progress(self) -> None:
        """Let MPI work on what is posted, and post again what has become free."""
        if self._released:
            self._released = [
                position
                for position in self._released
                if position.stage is _Stage.RELEASED and not self._recover(position)
            ]
        position = self._ring[self._sequence % self._depth]
        if position.stage is _Stage.POSTED:
            position.request.Test()

    def drain(self) -> list[int]:
        """Receive up to the end of the channel; the minibatches of the messages that nobody had asked for."""
        unread: list[int] = []
        for position in self._ring:
            if position.stage is _Stage.HELD:
                self._let_go(position)
        while True:
            position = self._ring[self._sequence % self._depth]
            self._await_header(position, header.UNKNOWN)
            layout = self._read(position, position.buffer.words[2])
            if layout.state is State.END:
                position.stage = _Stage.RELEASED
                return unread
            minibatch = position.buffer.words[2]
            unread.append(minibatch)
            self._collect(position, layout, minibatch)
            self._sequence += 1
            self._let_go(position)

    def close(self) -> None:
        """Take back every posted receive and free the persistent requests."""
        for position in self._ring:
            posted = [position.request] if position.stage is _Stage.POSTED else []
            posted += [request for slot in position.slots if slot.posted for request in slot.requests]
            for request in posted:
                request.Cancel()
            # Taking back what was posted is this rank's own business: no peer has to do anything.
            self._waiter.wait(posted, lambda: f"the end of the {self.channel}", kind="finish")
            for request in [position.request, *(r for slot in position.slots for r in slot.requests)]:
                request.Free()
        self._ring.clear()

    def _await_header(self, position: _Position, minibatch: int) -> None:
        if position.stage is _Stage.HELD:
            raise TransportError(
                f"{receiving(self.channel, minibatch)}: all {self._depth} ring positions are held; release "
                "earlier messages first, or give the channel a deeper ring"
            )
        if position.stage is _Stage.RELEASED:
            self._waiter.wait(
                [Condition(lambda: position.stage is _Stage.POSTED or self._recover(position))],
                lambda: f"the last reader of the memory of the {self.channel}",
                kind=self.channel.kind.word,
                peers=self._takers,
            )
        if not done_soon(position.request):
            self._waiter.wait(
                [position.request],
                lambda: self._awaited(minibatch),
                kind=self.channel.kind.word,
                peers=(self._wire.peer,),
            )

    def _read(self, position: _Position, minibatch: int) -> Layout:
        words = position.buffer.words
        if words[0] != header.MAGIC or words[1] != self._sequence or not header.TAIL < words[5] <= header.WORDS:
            raise TransportError(
                f"{receiving(self.channel, minibatch)}: this is not message {self._sequence} of the channel but "
                f"{words[:8].tolist()}; do all ranks run the same hpcpipe?"
            )
        tail = position.buffer.bytes[8 * header.TAIL : 8 * words[5]].tobytes()
        return self._layouts.get(tail) or self._admit(tail, position, words[2])

    def _admit(self, tail: bytes, position: _Position, minibatch: int) -> Layout:
        layout = header.decode_tail(tail)
        if (layout.kind, layout.depth) != (self.channel.kind, self._depth):
            raise TransportError(
                f"{receiving(self.channel, minibatch)}: expected kind {self.channel.kind} with a ring of "
                f"{self._depth}, got kind {layout.kind} with a ring of {layout.depth}"
            )
        if layout.state is State.END:
            return layout
        if self._agreement.admit(layout, lambda: receiving(self.channel, minibatch)):
            self._layouts.clear()
            self._agreed = object()
            for other in self._ring:
                if other.stage is _Stage.POSTED and other is not position:
                    self._post_tensors(other)
        if len(self._layouts) >= KNOWN_LAYOUTS:
            self._layouts.clear()
        self._layouts[tail] = layout
        return layout

    def _collect(self, position: _Position, layout: Layout, minibatch: int) -> tuple[Tensor | None, ...]:
        while len(position.slots) < len(layout.slots):
            position.slots.append(_Slot())
        pending: list[Request] = []
        for index, described in enumerate(layout.slots):
            if described is None:
                continue
            slot = position.slots[index]
            if slot.posted:
                slot.posted = False
                for request in slot.requests:
                    if not request.Test() and not done_soon(request):
                        pending.append(request)
            else:
                pending += self._follow(position, index, described)
        if pending:
            self._waiter.wait(
                pending,
                lambda: self._awaited(minibatch),
                kind=self.channel.kind.word,
                peers=(self._wire.peer,),
                yielding_s=PATIENT_YIELDING_S,
            )
        tensors: list[Tensor | None] = []
        for slot, described in zip(position.slots, layout.slots, strict=True):
            if described is None:
                tensors.append(None)
            else:
                landing = slot.landing or self._landing(slot, described.nbytes)
                tensors.append(landing.tensor(described))
        return tuple(tensors)

    def _follow(self, position: _Position, index: int, described: SlotLayout) -> list[Request]:
        """Receive a tensor for which nothing was posted ahead."""
        wire = self._wire
        landing = self._landing(position.slots[index], described.nbytes)
        tag = wire.tags[self._sequence % self._depth] + 1 + index
        return [
            wire.port.irecv(landing.address + offset, length, wire.peer, tag)
            for offset, length in wire.pieces(described.nbytes, 0)
        ]

    def _landing(self, slot: _Slot, nbytes: int) -> Landing:
        if slot.landing is None or slot.landing.nbytes < nbytes:
            slot.landing = self._memory.landing(nbytes)
        return slot.landing

    def _post(self, position: _Position) -> None:
        position.stage = _Stage.POSTED
        position.request.Start()
        self._post_tensors(position)

    def _post_tensors(self, position: _Position) -> None:
        """Post the receives of every slot whose full size is agreed and for which none is left from earlier."""
        if position.agreed is not self._agreed:
            self._prepare(position)
        for slot in position.slots:
            if not slot.posted:
                for request in slot.requests:
                    request.Start()
                    slot.posted = True

    def _prepare(self, position: _Position) -> None:
        """Make memory and persistent receives for every slot whose full size has been agreed since last time."""
        full = self._agreement.full
        while len(position.slots) < len(full):
            position.slots.append(_Slot())
        for index, (slot, described) in enumerate(zip(position.slots, full, strict=True)):
            if slot.requests or described is None:
                continue
            landing = self._landing(slot, described.nbytes)
            tag = self._wire.tags[self._ring.index(position)] + 1 + index
            slot.requests = [
                self._wire.port.recv_init(landing.address + offset, length, self._wire.peer, tag)
                for offset, length in self._wire.pieces(described.nbytes, 0)
            ]
        position.agreed = self._agreed

    def _let_go(self, position: _Position) -> None:
        position.stage = _Stage.RELEASED
        position.fence = self._memory.fence()
        if not self._recover(position):
            self._released.append(position)

    def _recover(self, position: _Position) -> bool:
        """Post a released position again if nobody reads its memory any more."""
        if position.fence is not None and not position.fence.query():
            return False
        for slot in position.slots:
            landing = slot.landing
            if landing is not None and self._being_sent(landing.address, landing.nbytes):
                return False
        position.fence = None
        self._post(position)
        return True

    def _awaited(self, minibatch: int) -> str:
        what = "the end of the channel" if minibatch == header.UNKNOWN else f"minibatch {minibatch}"
        return f"{self.channel.kind.word} of {what} from rank {self._wire.peer}"
