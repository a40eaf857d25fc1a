"""Every behaviour of the transport that needs real ranks, one function each, run one after another in one mpirun.

The ranks are the stages of a chain: activations go to the next rank, gradients back. Each rank computes what it
must receive from the minibatch number alone. Rank 0 prints `case NAME ok` when all ranks are through a case.

usage: transport_cases.py [host aware staged cuda] [CASE ...]
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from hpcpipe.transport.job import run_job
from hpcpipe.transport.message import ChannelId, Kind, Message, Receiver, Sender
from hpcpipe.transport.reports import Reports
from hpcpipe.transport.transport import DEFAULT_CHUNK_BYTES
from tests.mpi.programs.bench import Bench, Cases, bits, error_of

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
]
SHAPES: list[tuple[int, ...]] = [(), (1,), (0,), (7,), (3, 0, 2), (2, 3), (2, 3, 4, 5), (1, 1, 1, 1, 1, 1, 2)]


class Chain:
    """The channels of this rank to the next and from the previous one, and the gradients the other way."""

    def __init__(
        self,
        bench: Bench,
        *,
        depth: int = 2,
        full_rows: int | None = None,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        kind: Kind = Kind.ACTIVATION,
    ) -> None:
        rank, size = bench.world.rank, bench.world.size
        self.bench = bench
        self.transport = bench.transport(chunk_bytes=chunk_bytes)
        self.out: Sender | None = None
        self.inward: Receiver | None = None
        self.back_out: Sender | None = None
        self.back_in: Receiver | None = None
        if rank > 0:
            self.inward = self.transport.receiver(
                ChannelId(source=rank - 1, destination=rank, kind=kind), depth=depth
            )
            self.back_out = self.transport.sender(
                ChannelId(source=rank, destination=rank - 1, kind=Kind.GRADIENT), depth=depth, full_rows=full_rows
            )
        if rank < size - 1:
            self.out = self.transport.sender(
                ChannelId(source=rank, destination=rank + 1, kind=kind), depth=depth, full_rows=full_rows
            )
            self.back_in = self.transport.receiver(
                ChannelId(source=rank + 1, destination=rank, kind=Kind.GRADIENT), depth=depth
            )

    def cross(self, minibatch: int, tensors: tuple[Tensor | None, ...], **kwargs: int) -> None:
        """Send the same to the next rank as comes from the previous one, and compare what comes to the bit."""
        if self.out is not None:
            self.out.send(tensors, minibatch=minibatch, **kwargs)
        if self.inward is not None:
            message = self.inward.receive(minibatch=minibatch)
            self.bench.settle()
            assert_same(message.tensors, tensors)
            self.inward.release(message)

    def finish(self, *, discard: bool = False) -> None:
        self.transport.finish(discard=discard)
        assert self.transport.outstanding == 0


def assert_same(received: tuple[Tensor | None, ...], expected: tuple[Tensor | None, ...]) -> None:
    assert len(received) == len(expected)
    for got, wanted in zip(received, expected, strict=True):
        if wanted is None or got is None:
            assert got is None, got
            assert wanted is None, wanted
            continue
        assert got.dtype == wanted.dtype
        assert got.shape == wanted.shape, (got.shape, wanted.shape)
        assert got.is_contiguous()
        assert bits(got) == bits(wanted), (got, wanted)


def every_dtype_and_shape_crosses_to_the_bit(bench: Bench) -> None:
    for number, dtype in enumerate(DTYPES):
        chain = Chain(bench)
        for minibatch in range(4):
            seeds = 1000 * number + 10 * minibatch
            chain.cross(minibatch, tuple(bench.random(seeds + i, shape, dtype) for i, shape in enumerate(SHAPES)))
        chain.finish()


def hidden_mask_and_positions_cross_together(bench: Bench) -> None:
    chain = Chain(bench)
    for minibatch in range(6):
        chain.cross(
            minibatch,
            (
                bench.random(minibatch, (4, 6, 8), torch.bfloat16),
                bench.random(minibatch + 50, (4, 6), torch.bool),
                bench.random(minibatch + 90, (6,), torch.int64),
                None,
                torch.empty((0, 3), device=bench.device),
                torch.tensor(float(minibatch), device=bench.device),
            ),
        )
    chain.finish()


def tensors_that_are_not_contiguous_arrive_as_they_look(bench: Bench) -> None:
    chain = Chain(bench)
    for minibatch in range(3):
        base = bench.random(minibatch, (4, 6), torch.float32)
        wave = bench.random(minibatch, (3, 4), torch.complex64)
        chain.cross(
            minibatch,
            (
                base.T,
                base[:, ::2],
                base[:, :1].expand(4, 9),
                bench.random(minibatch, (1, 3, 4, 4), torch.float32).contiguous(memory_format=torch.channels_last),
                wave.conj(),
                wave.conj().imag,
            ),
        )
    chain.finish()


def gradients_come_back_for_what_required_one(bench: Bench) -> None:
    """Each stage doubles; the last one's loss is the sum; integer and constant tensors get no gradient."""
    world, chain = bench.world, Chain(bench)
    for minibatch in range(4):
        start = torch.arange(6.0, device=bench.device).view(2, 3) + minibatch
        incoming: Message | None = None
        if chain.inward is None:
            hidden = start.clone().requires_grad_()
        else:
            incoming = chain.inward.receive(minibatch=minibatch)
            bench.settle()
            assert incoming.requires_grad == (True, False, False)
            first = incoming.tensors[0]
            assert first is not None
            assert torch.equal(first, start * 2**world.rank)
            hidden = first.requires_grad_()
        output = hidden * 2
        if chain.out is None or chain.back_in is None:
            output.sum().backward()
        else:
            chain.out.send((output, torch.arange(3, device=bench.device), start), minibatch=minibatch)
            back = chain.back_in.receive(minibatch=minibatch)
            bench.settle()
            assert back.tensors[1:] == (None, None)
            output.backward(back.tensors[0])
            chain.back_in.release(back)
        assert hidden.grad is not None
        assert torch.equal(hidden.grad, torch.full_like(start, 2.0 ** (world.size - world.rank)))
        if chain.back_out is not None and incoming is not None and chain.inward is not None:
            chain.back_out.send((hidden.grad, None, None), minibatch=minibatch)
            chain.inward.release(incoming)
    chain.finish()


def a_short_last_minibatch_crosses(bench: Bench) -> None:
    chain = Chain(bench, full_rows=8)
    for minibatch, rows in enumerate([8, 8, 8, 3]):
        chain.cross(
            minibatch, (bench.random(minibatch, (rows, 5), torch.float32), bench.random(9, (rows,), torch.int64))
        )
    chain.finish()


def a_short_first_minibatch_is_followed_by_full_ones(bench: Bench) -> None:
    chain = Chain(bench, full_rows=8, depth=3)
    for minibatch, rows in enumerate([3, 8, 8, 5, 8, 1]):
        chain.cross(
            minibatch, (bench.random(minibatch, (rows, 5), torch.float32), bench.random(9, (rows,), torch.int64))
        )
    chain.finish()


def messages_are_cut_at_the_limit(bench: Bench) -> None:
    for size in (63, 64, 65, 127, 128, 129):
        chain = Chain(bench, chunk_bytes=64, full_rows=size)
        for minibatch, rows in enumerate([size, size, size // 2, 1, size]):
            chain.cross(minibatch, (bench.random(minibatch, (rows,), torch.uint8),))
        chain.finish()


def absent_tensors_may_be_others_in_each_message(bench: Bench) -> None:
    chain = Chain(bench)
    for minibatch in range(10):
        chain.cross(
            minibatch,
            tuple(
                bench.random(minibatch + slot, (5,), torch.float32) if (minibatch >> slot) % 2 else None
                for slot in range(3)
            ),
        )
    chain.finish()


def eight_mebibytes_go_both_ways_at_once(bench: Bench) -> None:
    chain = Chain(bench)
    there = bench.random(1, (2 << 20,), torch.float32)
    back = bench.random(2, (2 << 20,), torch.float32)
    for minibatch in range(3):
        # Everybody sends to both neighbours before anybody receives.
        if chain.out is not None:
            chain.out.send((there,), minibatch=minibatch)
        if chain.back_out is not None:
            chain.back_out.send((back,), minibatch=minibatch)
        for receiver, expected in ((chain.inward, there), (chain.back_in, back)):
            if receiver is not None:
                message = receiver.receive(minibatch=minibatch)
                bench.settle()
                assert_same(message.tensors, (expected,))
                receiver.release(message)
    chain.finish()


def a_temporary_may_be_forgotten_after_its_send(bench: Bench) -> None:
    chain = Chain(bench, depth=4)
    base = bench.random(3, (1 << 20,), torch.int32)
    if chain.out is not None:
        for minibatch in range(4):
            chain.out.send((base + minibatch,), minibatch=minibatch)
        gc.collect()
        garbage = [torch.full((1 << 20,), -1, dtype=torch.int32, device=bench.device) for _ in range(4)]
        assert len(garbage) == 4
    if chain.inward is not None:
        for minibatch in range(4):
            message = chain.inward.receive(minibatch=minibatch)
            bench.settle()
            assert_same(message.tensors, (base + minibatch,))
            chain.inward.release(message)
    chain.finish()


def the_ring_is_used_again_after_release(bench: Bench) -> None:
    chain = Chain(bench, depth=2)
    addresses = set()
    for minibatch in range(9):
        tensor = bench.random(minibatch, (100,), torch.float64)
        if chain.out is not None:
            chain.out.send((tensor,), minibatch=minibatch)
        if chain.inward is not None:
            message = chain.inward.receive(minibatch=minibatch)
            (received,) = message.tensors
            assert received is not None
            addresses.add(received.data_ptr())
            bench.settle()
            assert_same(message.tensors, (tensor,))
            chain.inward.release(message)
    assert len(addresses) == (0 if chain.inward is None else 2)
    chain.finish()


def a_stage_may_pass_its_input_on_and_let_go_of_it(bench: Bench) -> None:
    chain = Chain(bench, depth=1, kind=Kind.EVALUATION)
    for minibatch in range(12):
        tensor = bench.random(minibatch, (1 << 16,), torch.float32)
        if chain.inward is None:
            if chain.out is not None:
                chain.out.send((tensor,), minibatch=minibatch)
            continue
        message = chain.inward.receive(minibatch=minibatch)
        if chain.out is not None:
            chain.out.send(message.tensors, minibatch=minibatch)
        else:
            bench.settle()
            assert_same(message.tensors, (tensor,))
        chain.inward.release(message)
    chain.finish()


def a_changed_shape_is_named_and_the_channel_stays_usable(bench: Bench) -> None:
    chain = Chain(bench, full_rows=4)
    chain.cross(0, (bench.random(0, (4, 5), torch.float32),))
    if chain.out is not None:
        out, rank = chain.out, bench.world.rank
        said = error_of(lambda: out.send((torch.zeros(4, 6, device=bench.device),), minibatch=1))
        assert said == (
            f"stage {rank} sends the activation of minibatch 1 to stage {rank + 1}: tensor 0: expected float32 "
            "(4, 5), got float32 (4, 6) in a full minibatch of 4 rows"
        )
    chain.cross(1, (bench.random(1, (4, 5), torch.float32),))
    chain.finish()


def messages_that_nobody_asked_for_are_named_at_the_end(bench: Bench) -> None:
    chain = Chain(bench, depth=2)
    if chain.out is not None:
        for minibatch in range(3):
            chain.out.send((bench.random(minibatch, (1 << 18,), torch.float32),), minibatch=minibatch)
    if chain.inward is not None:
        chain.inward.receive(minibatch=0)
        said = error_of(chain.finish)
        assert "nobody received the activations" in said
        assert said.endswith("of minibatches 1, 2")
    else:
        chain.finish()


def a_stop_in_the_middle_discards_what_is_on_its_way(bench: Bench) -> None:
    chain = Chain(bench, depth=3)
    for minibatch in range(3):
        if chain.out is not None:
            chain.out.send((bench.random(minibatch, (1 << 18,), torch.float32),), minibatch=minibatch)
        if chain.back_out is not None:
            chain.back_out.send((bench.random(minibatch, (1 << 18,), torch.float32),), minibatch=minibatch)
    chain.finish(discard=True)


def several_stages_on_a_rank_talk_without_mpi_and_with_it(bench: Bench) -> None:
    world = bench.world
    stages = [[stage // 2] for stage in range(2 * world.size)]
    mine = [2 * world.rank, 2 * world.rank + 1]
    transport = bench.transport(ranks_of_stage=stages)
    senders: dict[int, Sender] = {}
    receivers: dict[int, Receiver] = {}
    for stage in mine:
        if stage > 0:
            receivers[stage] = transport.receiver(
                ChannelId(source=stage - 1, destination=stage, kind=Kind.ACTIVATION), depth=2
            )
        if stage < len(stages) - 1:
            senders[stage] = transport.sender(
                ChannelId(source=stage, destination=stage + 1, kind=Kind.ACTIVATION), depth=2, full_rows=None
            )
    for minibatch in range(5):
        expected = bench.random(minibatch, (3, 4), torch.float32)
        for stage in mine:
            if stage in receivers:
                message = receivers[stage].receive(minibatch=minibatch)
                bench.settle()
                assert_same(message.tensors, (expected,))
                receivers[stage].release(message)
            if stage in senders:
                senders[stage].send((expected,), minibatch=minibatch)
    assert len(transport.sent) == (1 if world.rank < world.size - 1 else 0)
    transport.finish()


def both_ends_count_messages_and_bytes(bench: Bench) -> None:
    chain = Chain(bench)
    for minibatch in range(3):
        chain.cross(minibatch, (bench.random(minibatch, (10,), torch.float32), None))
    for stats in [*chain.transport.sent.values(), *chain.transport.received.values()]:
        assert (stats.messages, stats.payload_bytes) in ((3, 120), (0, 0))
    sent = sum(stats.messages for stats in chain.transport.sent.values())
    assert sent == (3 if chain.out is not None else 0)
    chain.finish()


def json_collectives_bring_every_rank_the_same(bench: Bench) -> None:
    world = bench.world
    value = {"rank": world.rank, "text": "ü" * (1 + 100 * world.rank), "list": [None, 1.5, True]}
    everybody = world.all_gather_json(value, what="a test")
    assert [entry["rank"] for entry in everybody] == list(range(world.size))
    assert everybody[world.rank] == value
    assert world.broadcast_json(value, what="a test") == everybody[0]
    assert world.gather_json(value, what="a test") == (everybody if world.rank == 0 else None)
    world.barrier("a test")


def sums_over_ranks_have_the_same_bits_everywhere(bench: Bench) -> None:
    world = bench.world
    parts = [
        np.random.default_rng(rank).standard_normal((3, 5)).astype(np.float32) * 10.0**rank
        for rank in range(world.size)
    ]
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    summed = world.all_reduce_sum(parts[world.rank], what="a test")
    assert summed.dtype == np.float32
    assert summed.tobytes() == total.tobytes()
    assert world.all_reduce_sum(np.array(world.rank), what="a test") == sum(range(world.size))
    assert "different arrays" in error_of(lambda: world.all_reduce_sum(np.zeros(world.rank), what="a test"))


def reports_reach_rank_0_in_order(bench: Bench) -> None:
    world = bench.world
    reports = Reports(world, world.waiter, length=3)
    found: list[tuple[int, list[int]]] = []
    for number in range(4):
        reports.send((number, world.rank, 2**62))
        found += reports.poll()
    found += reports.finish()
    expected = [[number, rank, 2**62] for rank in range(world.size) for number in range(4)]
    by_rank = [values for rank in range(world.size) for source, values in found if source == rank]
    assert by_rank == (expected if world.rank == 0 else [])
    assert "3 integers, not 1" in error_of(lambda: reports.send((1,)))


def the_world_knows_hosts_and_local_ranks(bench: Bench) -> None:
    world = bench.world
    assert world.local_rank == world.rank
    assert world.hosts == [world.host] * world.size
    assert world.library.split()[-1][0].isdigit()
    assert world.library in bench.transport().line
    assert world.thread_level == "funneled"
    assert world.notes == []
    world.waiter.idle.clear()


def a_program_may_be_started_after_mpi(bench: Bench) -> None:
    assert subprocess.run([sys.executable, "-c", "print(7)"], capture_output=True, check=True).stdout == b"7\n"


PER_MEMORY: tuple[Callable[[Bench], None], ...] = (
    every_dtype_and_shape_crosses_to_the_bit,
    hidden_mask_and_positions_cross_together,
    tensors_that_are_not_contiguous_arrive_as_they_look,
    gradients_come_back_for_what_required_one,
    a_short_last_minibatch_crosses,
    a_short_first_minibatch_is_followed_by_full_ones,
    messages_are_cut_at_the_limit,
    absent_tensors_may_be_others_in_each_message,
    eight_mebibytes_go_both_ways_at_once,
    a_temporary_may_be_forgotten_after_its_send,
    the_ring_is_used_again_after_release,
    a_stage_may_pass_its_input_on_and_let_go_of_it,
    a_changed_shape_is_named_and_the_channel_stays_usable,
    messages_that_nobody_asked_for_are_named_at_the_end,
    a_stop_in_the_middle_discards_what_is_on_its_way,
    several_stages_on_a_rank_talk_without_mpi_and_with_it,
    both_ends_count_messages_and_bytes,
)
ONCE: tuple[Callable[[Bench], None], ...] = (
    json_collectives_bring_every_rank_the_same,
    sums_over_ranks_have_the_same_bits_everywhere,
    reports_reach_rank_0_in_order,
    the_world_knows_hosts_and_local_ranks,
    a_program_may_be_started_after_mpi,
)


CASES = Cases(ONCE, PER_MEMORY)


if __name__ == "__main__":
    sys.exit(run_job(lambda world: CASES.run(world, sys.argv[1:] or ["host", "aware", "staged"])))
