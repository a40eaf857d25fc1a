"""Both ends of a channel over a port inside this process: what the wire carries, and when memory is used again."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from hpcpipe.errors import TransportError
from hpcpipe.transport.buffers import AwareMemory, HostMemory, Memory, StagedMemory
from hpcpipe.transport.channel import MpiSender, Wire
from hpcpipe.transport.message import ChannelId, Kind
from hpcpipe.transport.receiver import MpiReceiver
from hpcpipe.transport.wait import Waiter
from tests.mpi.fake_device import FakeDevice
from tests.mpi.loop_port import LoopPort

CHANNEL = ChannelId(source=1, destination=2, kind=Kind.ACTIVATION)


@dataclass
class Link:
    sender: MpiSender
    receiver: MpiReceiver
    port: LoopPort

    def cross(self, tensors: Sequence[Tensor | None], minibatch: int, **kwargs: int) -> tuple[Tensor | None, ...]:
        self.sender.send(tensors, minibatch=minibatch, **kwargs)
        message = self.receiver.receive(minibatch=minibatch)
        values = tuple(None if tensor is None else tensor.clone() for tensor in message.tensors)
        self.receiver.release(message)
        return values


def _link(
    memory: Memory | None = None,
    *,
    depth: int = 2,
    full_rows: int | None = None,
    chunk_bytes: int = 1 << 30,
    receiver_depth: int | None = None,
    log: list[object] | None = None,
) -> Link:
    port = LoopPort(log)
    memory = memory or HostMemory()
    wire = Wire(port=port, peer=0, tags=tuple(64 * (i + 1) for i in range(depth)), chunk_bytes=chunk_bytes)
    sender = MpiSender(CHANNEL, wire, memory, depth=depth, full_rows=full_rows)

    def being_sent(address: int, nbytes: int) -> bool:
        return any(
            address <= sent < address + nbytes for flight in sender.flights for sent in flight.departure.addresses
        )

    waiter = Waiter(rank=0, warn_after_s=0.05, abort_after_s=0.1, log=lambda line: None)
    waiter.idle.append(sender.progress)
    receiver = MpiReceiver(CHANNEL, wire, memory, waiter, depth=receiver_depth or depth, being_sent=being_sent)
    waiter.idle.append(receiver.progress)
    return Link(sender, receiver, port)


def test_control_word_and_gradient_flags_arrive_with_the_tensors() -> None:
    link = _link()
    link.sender.send(
        (torch.ones(2, requires_grad=True), torch.arange(3), None), minibatch=5, microbatch=1, control=-(2**62)
    )

    message = link.receiver.receive(minibatch=5, microbatch=1)

    assert message.control == -(2**62)
    assert message.requires_grad == (True, False, False)
    assert message.tensors[2] is None
    assert all(not tensor.requires_grad for tensor in message.tensors if tensor is not None)


def test_flags_can_be_given_instead_of_taken_from_the_tensors() -> None:
    link = _link()
    link.sender.send((torch.ones(2), torch.ones(2)), minibatch=0, requires_grad=(False, True))

    assert link.receiver.receive(minibatch=0).requires_grad == (False, True)


def test_a_message_without_tensors_is_a_message() -> None:
    assert _link().cross((), 0) == ()


def test_payload_receives_are_posted_ahead_once_a_full_message_was_seen() -> None:
    link = _link(depth=3)
    assert link.port.posted == 3
    link.sender.send((torch.ones(4), torch.ones(2)), minibatch=0)
    link.receiver.receive(minibatch=0)

    assert link.port.posted == 2 * 3


@pytest.mark.parametrize("rows", [[8, 8, 3], [3, 8, 8, 2], [3, 5, 8, 8], [8, 0, 8], [1, 1, 1]])
def test_short_and_full_minibatches_come_in_any_order(rows: list[int]) -> None:
    link = _link(full_rows=8)
    for minibatch, count in enumerate(rows):
        sent = (torch.randn(count, 5), torch.arange(count))
        received = link.cross(sent, minibatch)
        assert all(torch.equal(a, b) for a, b in zip(sent, received, strict=True) if b is not None)


@pytest.mark.parametrize("rows", [[8, 8, 3, 8], [3, 8, 8, 2]])
def test_short_minibatches_whose_batch_is_not_the_leading_dimension(rows: list[int]) -> None:
    link = _link(full_rows=8)
    for minibatch, count in enumerate(rows):
        sent = torch.randn(5, count, 2)
        (received,) = link.cross((sent,), minibatch, rows=count)
        assert received is not None
        assert torch.equal(sent, received)


def test_absent_tensors_leave_posted_receives_for_the_next_message() -> None:
    link = _link(depth=2)
    for minibatch in range(12):
        sent = [torch.full((4,), float(minibatch)) if minibatch % 3 != slot else None for slot in (0, 1)]
        received = link.cross(sent, minibatch)
        assert [None if t is None else t.tolist() for t in received] == [
            None if t is None else t.tolist() for t in sent
        ]


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 127, 128, 129, 1000])
def test_a_tensor_is_cut_into_pieces_at_the_limit(size: int) -> None:
    link = _link(chunk_bytes=64)
    for minibatch in range(4):
        sent = torch.randint(0, 256, (size,), dtype=torch.uint8)
        (received,) = link.cross((sent,), minibatch)
        assert received is not None
        assert torch.equal(sent, received)
    payloads = [entry[2] for entry in link.port.log if isinstance(entry, tuple) and entry[1] % 64 == 1]
    assert all(length <= 64 for length in payloads)
    assert len(payloads) == 4 * -(-size // 64)


def test_a_short_minibatch_has_as_many_pieces_as_a_full_one() -> None:
    link = _link(chunk_bytes=64, full_rows=10)
    for minibatch, rows in enumerate([10, 10, 1, 10, 3, 10, 10]):
        sent = torch.randint(0, 256, (rows, 20), dtype=torch.uint8)
        (received,) = link.cross((sent,), minibatch)
        assert received is not None
        assert torch.equal(sent, received)
    assert link.port.unmatched == 0


def test_a_changed_shape_is_an_error_at_the_sender_and_nothing_is_sent() -> None:
    link = _link(full_rows=8)
    link.cross((torch.zeros(8, 16),), 6)
    sent_before = len(link.port.log)

    with pytest.raises(
        TransportError,
        match=r"stage 1 sends the activation of minibatch 7 to stage 2: tensor 0: expected float32 \(8, 16\), "
        r"got float32 \(8, 17\)",
    ):
        link.sender.send((torch.zeros(8, 17),), minibatch=7)

    assert len(link.port.log) == sent_before


def test_a_changed_shape_is_an_error_at_the_receiver_too() -> None:
    link = _link(full_rows=8)
    link.cross((torch.zeros(8, 16),), 6)
    careless = MpiSender(CHANNEL, link.sender._wire, HostMemory(), depth=2, full_rows=8)
    careless._sequence = 1
    careless.send((torch.zeros(8, 15),), minibatch=7)

    with pytest.raises(
        TransportError,
        match=r"stage 2 receives the activation of minibatch 7 from stage 1: tensor 0: expected float32 "
        r"\(8, 16\), got float32 \(8, 15\)",
    ):
        link.receiver.receive(minibatch=7)


def test_more_rows_than_a_full_minibatch_are_refused() -> None:
    with pytest.raises(TransportError, match="9 rows are more than the 8 of a full minibatch"):
        _link(full_rows=8).sender.send((torch.zeros(9, 2),), minibatch=0, rows=9)


def test_a_dtype_that_cannot_be_sent_is_named_with_its_message() -> None:
    odd = torch.empty(2, dtype=torch.bits8)

    with pytest.raises(
        TransportError, match=r"activation of minibatch 3 to stage 2: tensors of dtype torch\.bits8"
    ):
        _link().sender.send((odd,), minibatch=3)


def test_another_minibatch_than_expected_is_an_error_with_both() -> None:
    link = _link()
    link.sender.send((torch.ones(1),), minibatch=4)

    with pytest.raises(
        TransportError, match="expected microbatch 0 of minibatch 5, got microbatch 0 of minibatch 4"
    ):
        link.receiver.receive(minibatch=5)


def test_ends_with_rings_of_different_depth_are_an_error() -> None:
    link = _link(depth=2, receiver_depth=3)
    link.sender.send((torch.ones(1),), minibatch=0)

    with pytest.raises(TransportError, match="expected kind 0 with a ring of 3, got kind 0 with a ring of 2"):
        link.receiver.receive(minibatch=0)


def test_a_stray_header_is_an_error_and_not_data() -> None:
    link = _link()
    link.sender._sequence = 2
    link.sender.send((torch.ones(1),), minibatch=0)

    with pytest.raises(TransportError, match="this is not message 0 of the channel"):
        link.receiver.receive(minibatch=0)


def test_a_full_ring_is_an_error_that_says_what_to_do() -> None:
    link = _link(depth=2)
    for minibatch in range(3):
        link.sender.send((torch.ones(1),), minibatch=minibatch)
    held = [link.receiver.receive(minibatch=minibatch) for minibatch in range(2)]

    with pytest.raises(TransportError, match="all 2 ring positions are held; release earlier messages first"):
        link.receiver.receive(minibatch=2)

    link.receiver.release(held[0])
    assert link.receiver.receive(minibatch=2).minibatch == 2


def test_messages_may_be_released_in_any_order() -> None:
    link = _link(depth=3)
    for minibatch in range(3):
        link.sender.send((torch.full((2,), float(minibatch)),), minibatch=minibatch)
    held = [link.receiver.receive(minibatch=minibatch) for minibatch in range(3)]
    for message in reversed(held):
        link.receiver.release(message)
    for minibatch in range(3, 6):
        (received,) = link.cross((torch.full((2,), float(minibatch)),), minibatch)
        assert received is not None
        assert received.tolist() == [float(minibatch)] * 2


def test_a_message_cannot_be_released_twice() -> None:
    link = _link()
    link.sender.send((torch.ones(1),), minibatch=0)
    message = link.receiver.receive(minibatch=0)
    link.receiver.release(message)

    with pytest.raises(TransportError, match="minibatch 0 from stage 1: released twice"):
        link.receiver.release(message)


def test_the_memory_of_a_ring_is_used_again_and_again() -> None:
    link = _link(depth=2)
    addresses = set()
    for minibatch in range(20):
        link.sender.send((torch.ones(64),), minibatch=minibatch)
        message = link.receiver.receive(minibatch=minibatch)
        (tensor,) = message.tensors
        assert tensor is not None
        addresses.add(tensor.data_ptr())
        link.receiver.release(message)

    assert len(addresses) == 2


def test_a_temporary_lives_until_it_has_been_sent() -> None:
    link = _link()
    source = torch.arange(1024.0)
    link.sender.send((source * 2,), minibatch=0)
    gc.collect()
    garbage = [torch.full((1024,), -1.0) for _ in range(50)]

    (received,) = link.receiver.receive(minibatch=0).tensors

    assert received is not None
    assert torch.equal(received, source * 2)
    assert len(garbage) == 50


def test_memory_of_the_ring_that_is_being_passed_on_is_not_posted_again_before_it_is_sent() -> None:
    link = _link(depth=1)
    link.sender.send((torch.full((4,), 1.0),), minibatch=0)
    message = link.receiver.receive(minibatch=0)
    # The stage passes its input on as it is, and lets go of it at once.
    link.sender.send(message.tensors, minibatch=1)
    link.receiver.release(message)
    assert link.port.posted == 0

    link.sender.flights.clear()
    link.receiver.progress()

    assert link.port.posted > 0


@pytest.mark.parametrize("strategy", [AwareMemory, StagedMemory], ids=["aware", "staged"])
def test_device_bytes_are_final_before_the_first_send_call(
    strategy: type[AwareMemory] | type[StagedMemory],
) -> None:
    device = FakeDevice()
    log: list[object] = device.log  # type: ignore[assignment]
    link = _link(strategy(device), log=log)
    source = torch.zeros(4)
    device.queue(lambda: source.fill_(5.0))

    link.sender.send((source, torch.ones(3)), minibatch=0)

    names = [entry if isinstance(entry, str) else entry[0] for entry in log]  # type: ignore[index]
    assert names == ["copy", "copy", "record", "synchronize", "isend", "isend", "isend"]
    message = link.receiver.receive(minibatch=0)
    device.synchronize()
    assert [None if t is None else t.tolist() for t in message.tensors] == [[5.0] * 4, [1.0] * 3]


@pytest.mark.parametrize("strategy", [AwareMemory, StagedMemory], ids=["aware", "staged"])
def test_device_memory_is_posted_again_only_behind_its_last_reader(
    strategy: type[AwareMemory] | type[StagedMemory],
) -> None:
    device = FakeDevice()
    link = _link(strategy(device), depth=1)
    seen: list[list[float]] = []
    for minibatch in range(4):
        link.sender.send((torch.full((4,), float(minibatch)),), minibatch=minibatch)
        message = link.receiver.receive(minibatch=minibatch)
        (tensor,) = message.tensors
        assert tensor is not None
        for _ in range(5):
            device.queue(lambda: None)
        device.queue(lambda tensor=tensor: seen.append(tensor.tolist()))
        link.receiver.release(message)
        assert link.port.posted == 0

    device.synchronize()

    assert seen == [[float(minibatch)] * 4 for minibatch in range(4)]


def test_the_end_of_a_channel_leaves_nothing_behind() -> None:
    link = _link(depth=3)
    for minibatch in range(5):
        link.cross((torch.ones(4), None), minibatch)

    link.sender.end()
    assert link.receiver.drain() == []
    link.sender.progress()
    link.receiver.close()

    assert (link.sender.flights, link.port.posted, link.port.unmatched) == ([], 0, 0)


def test_the_end_of_a_channel_tells_what_nobody_received() -> None:
    link = _link(depth=2)
    for minibatch in range(5):
        link.sender.send((torch.ones(4),), minibatch=minibatch)
    link.receiver.receive(minibatch=0)
    link.sender.end()

    assert link.receiver.drain() == [1, 2, 3, 4]


def test_nothing_can_be_sent_after_the_end() -> None:
    link = _link()
    link.sender.end()

    with pytest.raises(TransportError, match="minibatch 1 sent after the end of the activations from stage 1"):
        link.sender.send((torch.ones(1),), minibatch=1)


def test_a_message_that_does_not_come_is_named() -> None:
    with pytest.raises(TransportError, match="rank 0 waited for activation of minibatch 71 from rank 0 for 0 s"):
        _link().receiver.receive(minibatch=71)


def test_each_end_counts_messages_and_bytes() -> None:
    link = _link()
    for minibatch in range(3):
        link.cross((torch.ones(4), None, torch.ones(2, dtype=torch.bfloat16)), minibatch)

    assert (link.sender.stats.messages, link.sender.stats.payload_bytes) == (3, 3 * 20)
    assert (link.receiver.stats.messages, link.receiver.stats.payload_bytes) == (3, 3 * 20)


def test_the_steady_state_makes_no_new_buffers() -> None:
    class Counting(HostMemory):
        landings = 0

        def landing(self, nbytes: int):  # type: ignore[no-untyped-def]
            self.landings += 1
            return super().landing(nbytes)

    memory = Counting()
    link = _link(memory, depth=2)
    for minibatch in range(4):
        link.cross((torch.ones(4), torch.ones(5)), minibatch)
    link.sender.progress()
    made, headers = memory.landings, len(link.sender._spare)
    for minibatch in range(4, 40):
        link.cross((torch.ones(4), torch.ones(5)), minibatch)

    link.sender.progress()
    assert (memory.landings, len(link.sender._spare)) == (made, headers) == (4, 1)
