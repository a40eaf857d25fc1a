"""Channels between replicas: their names, and what the transport of one rank of three refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from hpcpipe.errors import TransportError
from hpcpipe.transport.message import ChannelId, Kind
from hpcpipe.transport.transport import Transport
from tests.mpi.fake_device import FakeDevice
from tests.oracle.lone_world import LoneWorld


def _channel(source: tuple[int, int], destination: tuple[int, int]) -> ChannelId:
    return ChannelId(
        source=source[0],
        source_replica=source[1],
        destination=destination[0],
        destination_replica=destination[1],
        kind=Kind.ACTIVATION,
    )


def _transport(ranks_of_stage: Sequence[Sequence[int]], *, library: str = "no MPI") -> Transport:
    world = LoneWorld()
    world.size = 3
    world.library = library
    return Transport(
        world,
        world.waiter,
        ranks_of_stage=ranks_of_stage,
        device=torch.device("cpu"),
        cuda_aware=True,
        device_api=FakeDevice(),
    )


def test_a_channel_without_replicas_is_named_by_its_stages() -> None:
    assert str(_channel((0, 0), (1, 0))) == "activations from stage 0 to stage 1"


def test_a_replica_is_named_only_where_a_stage_has_several() -> None:
    channel = ChannelId(source=0, destination=1, destination_replica=0, kind=Kind.GRADIENT, destination_replicas=2)

    assert str(channel) == "gradients from stage 0 to stage 1 replica 0"


def test_channels_of_other_replicas_are_others_and_names_make_no_difference() -> None:
    channel = _channel((0, 0), (1, 0))

    assert channel != _channel((0, 0), (1, 1))
    same = ChannelId(source=0, destination=1, kind=Kind.ACTIVATION, source_replicas=4)
    assert channel == same
    assert hash(channel) == hash(same)


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (
            lambda: _transport([[0], [1, 2]]).sender(_channel((0, 0), (1, 2)), depth=1, full_rows=None),
            "the activations from stage 0 to stage 1 replica 2: stage 1 has 2 replicas, none is number 2",
        ),
        (
            lambda: _transport([[0], [1, 2]]).receiver(_channel((0, 0), (1, 1)), depth=1),
            "the activations from stage 0 to stage 1 replica 1: stage 1 replica 1 is on rank 2, not on 0",
        ),
        (
            lambda: _transport([[1, 2], [0]]).sender(_channel((0, 1), (1, 0)), depth=1, full_rows=None),
            "the activations from stage 0 replica 1 to stage 1: stage 0 replica 1 is on rank 2, not on 0",
        ),
        (
            lambda: _transport([[1], [0]]).sender(_channel((0, 0), (1, 0)), depth=1, full_rows=None),
            "the activations from stage 0 to stage 1: stage 0 is on rank 1, not on 0",
        ),
        (lambda: _transport([[0], [1, 3]]), "stage 1 replica 1 is given to rank 3, but there are 3 ranks"),
        (lambda: _transport([[3]]), "stage 0 is given to rank 3, but there are 3 ranks"),
        (
            lambda: _transport([[0], [1, 1]]),
            "stage 1 is given to the ranks [1, 1]: needs one for each replica",
        ),
        (lambda: _transport([[0], []]), "stage 1 is given to the ranks []: needs one for each replica"),
        (
            lambda: _transport([[0], [1, 2]]).group(1),
            "rank 0 is not one of several replicas of stage 1, which is on the ranks [1, 2]",
        ),
        (
            lambda: _transport([[0], [1, 2]]).group(0),
            "rank 0 is not one of several replicas of stage 0, which is on the ranks [0]",
        ),
    ],
)
def test_what_does_not_fit_the_plan_is_refused_by_name(action: Callable[[], object], words: str) -> None:
    with pytest.raises(TransportError) as caught:
        action()

    assert str(caught.value) == words


def test_replicas_of_different_stages_on_one_rank_talk_without_mpi() -> None:
    transport = _transport([[0, 1], [2, 0]])
    sender = transport.sender(_channel((0, 0), (1, 1)), depth=1, full_rows=None)
    receiver = transport.receiver(_channel((0, 0), (1, 1)), depth=1)

    sender.send((torch.ones(2),), minibatch=0)

    (received,) = receiver.receive(minibatch=0).tensors
    assert received is not None
    assert received.tolist() == [1.0, 1.0]
    assert transport.sent == {}


def test_sums_are_staged_where_messages_need_not_be_if_the_library_demands_it() -> None:
    def line(ranks_of_stage: list[list[int]], library: str) -> str:
        return _transport(ranks_of_stage, library=library).line.removesuffix(f" over {library}, 3 ranks")

    plain = "device buffers, CUDA-aware"
    staged = f"{plain} (sums: device tensors staged through pinned host buffers)"
    assert line([[0, 1], [2]], "Open MPI 5.0.8") == staged
    assert line([[0], [1]], "Open MPI 5.0.8") == plain
    assert line([[0, 1], [2]], "MPICH 4.3.0") == plain
