"""What a stage holds of a minibatch between messages and passes: arrived tensors, graphs that wait for their B.

Owns the care for memory that belongs to a channel: received tensors are leaves in it, and whatever must outlive it
is copied. Knows nothing of weights, versions or of what comes next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from hpcpipe.engine.passes import ForwardPass
from hpcpipe.transport.message import Message, Receiver, Sender


@dataclass(kw_only=True)
class Channels:
    """The message channels of one stage's replica, by the replica at the other end; empty without a neighbour."""

    activations_in: dict[int, Receiver] = field(default_factory=dict)
    activations_out: dict[int, Sender] = field(default_factory=dict)
    gradients_in: dict[int, Receiver] = field(default_factory=dict)
    gradients_out: dict[int, Sender] = field(default_factory=dict)
    evaluations_in: dict[int, Receiver] = field(default_factory=dict)
    evaluations_out: dict[int, Sender] = field(default_factory=dict)


class Arrival:
    """A received message, whose memory belongs to the channel until `release`."""

    def __init__(self, receiver: Receiver, message: Message) -> None:
        self.message = message
        self._receiver = receiver

    def leaves(self) -> tuple[Tensor, ...]:
        """The tensors as leaves of a new graph; only those that want a gradient get one."""
        return tuple(
            tensor.detach().requires_grad_(wants)
            for tensor, wants in zip(self.present(), self.message.requires_grad, strict=True)
        )

    def present(self) -> tuple[Tensor, ...]:
        """The tensors without the empty slots."""
        return tuple(tensor for tensor in self.message.tensors if tensor is not None)

    def release(self) -> None:
        """Give the memory back to the channel."""
        self._receiver.release(self.message)


@dataclass(kw_only=True)
class InFlight:
    """A minibatch (or microbatch) between its F and its B at this stage."""

    forward: ForwardPass
    arrival: Arrival | None
    """The message that the inputs lie in; None at the first stage and after a restart."""
    buffers_before: dict[str, Tensor] | None
    """The stage's buffers before F, where a cut will need them."""
    input_gradients: tuple[Tensor | None, ...] = ()


def apart_from(arrival: Arrival | None, tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """`tensors`, copied where they lie in the memory of `arrival`, which will be posted again."""
    if arrival is None:
        return tuple(tensors)
    posted = {t.untyped_storage().data_ptr() for t in arrival.message.tensors if t is not None}
    return tuple(t.clone() if t is not None and t.untyped_storage().data_ptr() in posted else t for t in tensors)
