"""A channel between two stages of the same rank: a queue, with the manners of the one over MPI.

Tensors are copied, although they could be handed over: a stage may change what it received in place, and the
sender's graph may still need its own. Shapes are agreed and checked as on the wire.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from hpcpipe.errors import TransportError
from hpcpipe.transport.agreement import Agreement
from hpcpipe.transport.channel import KNOWN_LAYOUTS, layout_key, layout_of, receiving, sending
from hpcpipe.transport.header import Layout
from hpcpipe.transport.message import ChannelId, ChannelStats, Message


class LocalChannel:
    """Both ends of a channel within a rank; see `message.Sender` and `message.Receiver`.

    depth: the most messages that are on their way or held at once.
    full_rows: samples in a full minibatch, known once the sending end is made.
    """

    def __init__(self, channel: ChannelId, *, depth: int) -> None:
        self.stats = ChannelStats()
        self.channel = channel
        self.full_rows: int | None = None
        self._depth = depth
        self._agreement = Agreement()
        self._layouts: dict[object, Layout] = {}
        self._queue: deque[Message] = deque()
        self._held = 0

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
        key = layout_key(tensors, requires_grad, rows)
        layout = self._layouts.get(key) or self._admit(key, tensors, requires_grad, rows, minibatch)
        copies = tuple(None if tensor is None else _copy(tensor) for tensor in tensors)
        self.stats.messages += 1
        self.stats.payload_bytes += layout.payload_bytes
        self._queue.append(
            Message(
                tensors=copies,
                requires_grad=layout.requires_grad,
                control=control,
                minibatch=minibatch,
                microbatch=microbatch,
            )
        )

    def receive(self, *, minibatch: int, microbatch: int = 0) -> Message:
        where = receiving(self.channel, minibatch)
        if self._held >= self._depth:
            raise TransportError(
                f"{where}: all {self._depth} ring positions are held; release earlier messages first"
            )
        if not self._queue:
            raise TransportError(f"{where}: both stages are on this rank, and it has not been sent")
        message = self._queue.popleft()
        if (message.minibatch, message.microbatch) != (minibatch, microbatch):
            raise TransportError(
                f"{where}: expected microbatch {microbatch} of minibatch {minibatch}, got microbatch "
                f"{message.microbatch} of minibatch {message.minibatch}"
            )
        message.ticket = 0
        self._held += 1
        return message

    def release(self, message: Message) -> None:
        if message.ticket < 0:
            raise TransportError(f"{receiving(self.channel, message.minibatch)}: released twice")
        message.ticket = -1
        message.tensors = ()
        self._held -= 1

    def drain(self) -> list[int]:
        """The minibatches of the messages that nobody has asked for; they are dropped."""
        unread = [message.minibatch for message in self._queue]
        self._queue.clear()
        return unread

    def _admit(
        self,
        key: object,
        tensors: Sequence[Tensor | None],
        requires_grad: Sequence[bool] | None,
        rows: int | None,
        minibatch: int,
    ) -> Layout:
        layout = layout_of(
            self.channel,
            tensors,
            requires_grad,
            depth=self._depth,
            full_rows=self.full_rows,
            rows=rows,
            minibatch=minibatch,
        )
        if self._agreement.admit(layout, lambda: sending(self.channel, minibatch)):
            self._layouts.clear()
        if len(self._layouts) >= KNOWN_LAYOUTS:
            self._layouts.clear()
        self._layouts[key] = layout
        return layout


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
