"""What travels between stages: channel names, messages, and the two ends of a channel as the engine sees them.

A channel is a one-way queue between two replicas of two stages for one kind of message; messages arrive in the
order in which they were sent. Nothing here knows whether MPI, a device or a plain queue carries them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from torch import Tensor


class Kind(IntEnum):
    """What a channel carries; each kind has an order of its own: an evaluation never waits behind a gradient."""

    ACTIVATION = 0
    GRADIENT = 1
    EVALUATION = 2

    @property
    def word(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, kw_only=True)
class ChannelId:
    """A one-way queue from a replica of stage `source` to one of stage `destination` for messages of one kind.

    source_replicas, destination_replicas: how many replicas these stages have, for names only; the transport
        fills them in.
    """

    source: int
    destination: int
    kind: Kind
    source_replica: int = 0
    destination_replica: int = 0
    source_replicas: int = field(default=1, compare=False, repr=False)
    destination_replicas: int = field(default=1, compare=False, repr=False)

    @property
    def source_name(self) -> str:
        """The sender in words."""
        return place_name(self.source, self.source_replica, self.source_replicas)

    @property
    def destination_name(self) -> str:
        """The receiver in words."""
        return place_name(self.destination, self.destination_replica, self.destination_replicas)

    def __str__(self) -> str:
        return f"{self.kind.word}s from {self.source_name} to {self.destination_name}"


def place_name(stage: int, replica: int, replicas: int) -> str:
    """One of the `replicas` replicas of a stage in words: "stage 1 replica 2", and "stage 1" where it is alone."""
    return f"stage {stage} replica {replica}" if replicas > 1 or replica > 0 else f"stage {stage}"


@dataclass(kw_only=True, slots=True)
class Message:
    """One received message.

    tensors: one entry per slot in the order of the sender, None where the sender had none. On every path the
        memory belongs to the channel and is valid until `Receiver.release`; the tensors are leaves without
        `requires_grad`.
    requires_grad: whether the sender's tensor required a gradient, per slot; False for an absent one.
    control: the sender's control word.
    """

    tensors: tuple[Tensor | None, ...]
    requires_grad: tuple[bool, ...]
    control: int
    minibatch: int
    microbatch: int
    ticket: int = field(default=-1, repr=False)
    """Which ring position holds the memory; the channel's own business."""


@dataclass(kw_only=True, slots=True)
class ChannelStats:
    """Messages and payload bytes that one end of a channel has moved."""

    messages: int = 0
    payload_bytes: int = 0


class Sender(Protocol):
    """The sending end of a channel."""

    @property
    def stats(self) -> ChannelStats: ...

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
        """Start sending one message and return at once.

        tensors: any number up to `header.MAX_SLOTS`, any dtype, any shape, None for a slot without a tensor.
            On the host path a contiguous tensor is sent from its own memory, which must not change until the
            send is done.
        requires_grad: per slot; by default what the tensors say.
        rows: samples in this message; by default the leading dimension of the first tensor that has one.
            Needed only where that is not the batch dimension.

        Raises TransportError when dtype, number of slots, number of dimensions or shape differ from what was
        agreed.
        """


class Receiver(Protocol):
    """The receiving end of a channel."""

    @property
    def stats(self) -> ChannelStats: ...

    def receive(self, *, minibatch: int, microbatch: int = 0) -> Message:
        """Wait for the next message, which must be the one named.

        Raises TransportError when another message comes, when its shape is not the agreed one, when no ring
        position is free (release earlier messages first), or when the waiter gives up.
        """

    def release(self, message: Message) -> None:
        """Give the memory of `message` back to the channel: its tensors must not be used any more."""
