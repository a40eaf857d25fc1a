from __future__ import annotations

import pytest
import torch

from hpcpipe.errors import TransportError
from hpcpipe.transport.local import LocalChannel
from hpcpipe.transport.message import ChannelId, Kind


def _channel(depth: int = 2, full_rows: int | None = None) -> LocalChannel:
    channel = LocalChannel(ChannelId(source=0, destination=1, kind=Kind.GRADIENT), depth=depth)
    channel.full_rows = full_rows
    return channel


def test_a_message_within_a_rank_is_like_one_from_another() -> None:
    channel = _channel()
    sent = torch.arange(6.0).view(2, 3).T.requires_grad_()
    channel.send((sent, None, torch.tensor(True)), minibatch=3, microbatch=1, control=9)

    message = channel.receive(minibatch=3, microbatch=1)

    first, second, third = message.tensors
    assert first is not None
    assert torch.equal(first, sent)
    assert first.is_contiguous()
    assert not first.requires_grad
    assert second is None
    assert third is not None
    assert third.item() is True
    assert message.requires_grad == (True, False, False)
    assert message.control == 9


def test_a_change_in_place_does_not_reach_the_sender() -> None:
    channel = _channel()
    sent = torch.ones(3)
    channel.send((sent,), minibatch=0)

    (received,) = channel.receive(minibatch=0).tensors
    assert received is not None
    received.mul_(5)

    assert sent.tolist() == [1.0] * 3


def test_shapes_are_agreed_within_a_rank_too() -> None:
    channel = _channel(full_rows=8)
    channel.send((torch.zeros(3, 4),), minibatch=0)
    channel.send((torch.zeros(8, 4),), minibatch=1)

    with pytest.raises(TransportError, match=r"stage 0 sends the gradient of minibatch 2 to stage 1: .* \(8, 5\)"):
        channel.send((torch.zeros(8, 5),), minibatch=2)


def test_a_message_that_was_not_sent_is_an_error_and_not_a_hang() -> None:
    with pytest.raises(TransportError, match="both stages are on this rank, and it has not been sent"):
        _channel().receive(minibatch=0)


def test_another_minibatch_than_expected_is_an_error() -> None:
    channel = _channel()
    channel.send((), minibatch=0)

    with pytest.raises(
        TransportError, match="expected microbatch 0 of minibatch 1, got microbatch 0 of minibatch 0"
    ):
        channel.receive(minibatch=1)


def test_a_ring_within_a_rank_is_as_deep_as_asked() -> None:
    channel = _channel(depth=1)
    channel.send((), minibatch=0)
    channel.send((), minibatch=1)
    held = channel.receive(minibatch=0)

    with pytest.raises(TransportError, match="all 1 ring positions are held"):
        channel.receive(minibatch=1)

    channel.release(held)
    assert channel.receive(minibatch=1).minibatch == 1
    with pytest.raises(TransportError, match="released twice"):
        channel.release(held)
