"""What replicas of a stage do together, between real ranks; one function each, one after another in one mpirun.

Each rank computes what it must get from the numbers of the ranks alone. Rank 0 prints `case NAME ok` when all
ranks are through a case.

usage: group_cases.py [host aware staged cuda cuda-aware]
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from hpcpipe.transport.group import AVERAGED_AT_ONCE, StageGroup
from hpcpipe.transport.job import run_job
from hpcpipe.transport.message import ChannelId, Kind, Receiver, Sender
from hpcpipe.transport.reduce import BucketReduce
from hpcpipe.transport.transport import DEFAULT_CHUNK_BYTES
from hpcpipe.transport.world import World
from tests.mpi.fake_device import FakeDevice
from tests.mpi.programs.bench import Bench, Cases, bits, error_of

Buckets = list[tuple[int, int]]
ODD: Buckets = [(900, 1003), (300, 900), (17, 300), (16, 17), (0, 16)]
"""Buckets of a tensor of 1003 elements, the last layers first."""


class Team:
    """The group of all ranks as the replicas of one stage, and a tensor that they sum."""

    def __init__(
        self,
        bench: Bench,
        *,
        ranks_of_stage: list[list[int]] | None = None,
        stage: int = 0,
        numel: int = 1003,
        dtype: torch.dtype = torch.float32,
        buckets: Buckets = ODD,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    ) -> None:
        self.bench = bench
        self.everybody = ranks_of_stage or [list(range(bench.world.size))]
        self.ranks = self.everybody[stage]
        self.transport = bench.transport(ranks_of_stage=self.everybody, chunk_bytes=chunk_bytes)
        self.group = self.transport.group(stage)
        self.flat = torch.zeros(numel, dtype=dtype, device=bench.device)
        self.reducer = self.group.reducer(self.flat, buckets)

    def values(self, seed: int, rank: int) -> Tensor:
        """What a rank brings: numbers of very different sizes, so that every order of adding shows."""
        numbers = np.random.default_rng((seed, rank)).standard_normal(self.flat.numel())
        sizes = np.random.default_rng((seed, rank, 1)).integers(-30, 30, self.flat.numel())
        return torch.from_numpy(np.ldexp(numbers, sizes)).to(self.flat.dtype)

    def exact(self, seed: int) -> Tensor:
        return torch.stack([self.values(seed, rank).double() for rank in self.ranks]).sum(0)

    def fill(self, values: Tensor) -> None:
        """Queue the kernel that writes the tensor; on the CPU it is there at once."""
        if isinstance(self.bench.fake, FakeDevice):
            self.bench.fake.queue(lambda: self.flat.copy_(values))
        else:
            if self.flat.is_cuda:
                torch.cuda._sleep(1_000_000)
            self.flat.copy_(values, non_blocking=True)

    def round(self, seed: int, order: Sequence[int] | None = None) -> Tensor:
        """One round; a copy of the sums as a kernel sees them that is queued behind it."""
        self.reducer.begin()
        self.fill(self.values(seed, self.bench.world.rank))
        for bucket in order or range(self.reducer.buckets):
            self.reducer.ready(bucket)
        self.reducer.finish(lambda: f"the all-reduce of stage {self.group.stage}, minibatch {seed}")
        return self.look()

    def look(self) -> Tensor:
        seen = torch.zeros_like(self.flat)
        if self.bench.fake is not None:
            self.bench.fake.queue(lambda: seen.copy_(self.flat))
        else:
            seen.copy_(self.flat)
        self.bench.settle()
        return seen.cpu()

    def check_sum(self, sums: Tensor, seed: int) -> None:
        biggest = torch.stack([self.values(seed, rank).double().abs() for rank in self.ranks]).sum(0)
        error = (sums.double() - self.exact(seed)).abs()
        assert bool((error <= len(self.ranks) * torch.finfo(sums.dtype).eps * biggest).all())

    def finish(self) -> None:
        self.transport.finish()
        assert self.transport.outstanding == 0


def same_everywhere(world: World, value: bytes) -> bool:
    everybody = world.all_gather_json(value.hex(), what="the bits of all ranks")
    return all(other == everybody[0] for other in everybody)


def pairs_of(world: World) -> tuple[list[list[int]], int]:
    """Stages of two replicas each, with the odd rank in one of its own; and the stage of this rank."""
    stages = [list(range(first, min(first + 2, world.size))) for first in range(0, world.size, 2)]
    return stages, world.rank // 2


def all_replicas_get_the_same_bits(bench: Bench) -> None:
    for dtype in (torch.float32, torch.float64):
        team = Team(bench, dtype=dtype)
        for seed in range(3):
            sums = team.round(seed)
            team.check_sum(sums, seed)
            assert same_everywhere(bench.world, bits(sums))
        team.finish()


def sums_of_two_are_a_plus_b_to_the_bit(bench: Bench) -> None:
    stages, stage = pairs_of(bench.world)
    for dtype in (torch.float32, torch.float64):
        if len(stages[stage]) == 1:
            bench.transport(ranks_of_stage=stages).finish()
            continue
        team = Team(bench, ranks_of_stage=stages, stage=stage, dtype=dtype)
        for seed in range(3):
            first, second = (team.values(seed, rank) for rank in team.ranks)
            assert bits(team.round(seed)) == bits(first + second)
        team.finish()


def replicas_may_have_their_buckets_ready_in_different_orders(bench: Bench) -> None:
    team = Team(bench)
    chooser = random.Random(bench.world.rank)
    for seed in range(10):
        order = chooser.sample(range(len(ODD)), len(ODD))
        team.check_sum(team.round(seed, order), seed)
    team.finish()


def buckets_are_cut_at_the_limit(bench: Bench) -> None:
    whole = Team(bench)
    sums = [whole.round(seed) for seed in range(2)]
    whole.finish()
    for chunk_bytes in (64, 3):
        team = Team(bench, chunk_bytes=chunk_bytes, numel=1003)
        for seed in range(2):
            assert torch.allclose(team.round(seed), sums[seed], rtol=1e-5, atol=1e-2)
            team.check_sum(team.look(), seed)
        team.finish()


def a_bucket_may_be_empty_and_elements_may_be_left_out(bench: Bench) -> None:
    team = Team(bench, numel=10, buckets=[(7, 9), (3, 3), (0, 2)])
    sums = team.round(0)
    own, exact = team.values(0, bench.world.rank), team.exact(0).float()
    for index in range(10):
        expected = exact[index] if index in (0, 1, 7, 8) else own[index]
        assert torch.isclose(sums[index], expected, rtol=1e-5), index
    team.finish()
    nothing = Team(bench, numel=0, buckets=[])
    nothing.round(0)
    nothing.finish()


def large_buckets_are_summed(bench: Bench) -> None:
    numel = 1_500_001
    team = Team(bench, numel=numel, buckets=[(1_000_000, numel), (0, 1_000_000)])
    for seed in range(2):
        sums = team.round(seed)
        team.check_sum(sums, seed)
    team.finish()


def the_transport_moves_sums_that_nobody_waits_for(bench: Bench) -> None:
    team = Team(bench, buckets=[(0, 500), (500, 1003)])
    team.reducer.begin()
    team.fill(torch.full((1003,), float(bench.world.rank + 1)))
    team.reducer.ready(0)
    team.reducer.ready(1)
    total = float(sum(range(1, bench.world.size + 1)))
    until = time.monotonic() + 30.0
    while bool((team.flat != total).any()):
        team.transport.progress()
        if bench.fake is not None:
            bench.fake.run_one()
        assert time.monotonic() < until
    team.reducer.finish("the all-reduce")
    team.finish()


def a_gather_may_come_before_or_behind_the_start_of_a_sum(bench: Bench) -> None:
    team, world = Team(bench), bench.world
    for seed in range(6):
        team.reducer.begin()
        team.fill(team.values(seed, world.rank))
        first = (seed + world.rank) % len(ODD)
        for bucket in range(first):
            team.reducer.ready(bucket)
        rows = team.group.gather(np.array([float(world.rank), 0.5 * seed]), "the losses of stage 0")
        assert rows.tolist() == [[float(rank), 0.5 * seed] for rank in range(world.size)]
        for bucket in range(first, len(ODD)):
            team.reducer.ready(bucket)
        team.reducer.finish("the all-reduce")
        team.check_sum(team.look(), seed)
    team.finish()


def two_all_reduces_of_a_stage_do_not_meet(bench: Bench) -> None:
    team = Team(bench, buckets=[(0, 1003)])
    other = torch.zeros(7, dtype=torch.float64, device=bench.device)
    second = team.group.reducer(other, [(0, 4), (4, 7)])

    def all_ready(reducer: BucketReduce) -> None:
        reducer.begin()
        for bucket in range(reducer.buckets):
            reducer.ready(bucket)

    for seed in range(4):
        team.fill(team.values(seed, bench.world.rank))
        bench.settle()
        other.fill_(bench.world.rank + seed)
        for reducer in (team.reducer, second) if bench.world.rank % 2 else (second, team.reducer):
            all_ready(reducer)
        second.finish("the other all-reduce")
        team.reducer.finish("the all-reduce")
        team.check_sum(team.look(), seed)
        assert other.tolist() == [float(sum(rank + seed for rank in range(bench.world.size)))] * 7
    team.finish()


def stages_sum_at_the_same_time_while_messages_cross(bench: Bench) -> None:
    """Stages of two replicas where there are ranks for them: minibatch j goes to replica j mod r of each."""
    stages, stage = pairs_of(bench.world)
    transport = bench.transport(ranks_of_stage=stages)
    replica = stages[stage].index(bench.world.rank)
    inward: dict[int, Receiver] = {}
    outward: dict[int, Sender] = {}
    if stage > 0:
        for other in range(len(stages[stage - 1])):
            inward[other] = transport.receiver(channel(stage - 1, other, stage, replica), depth=2)
    if stage < len(stages) - 1:
        for other in range(len(stages[stage + 1])):
            outward[other] = transport.sender(channel(stage, replica, stage + 1, other), depth=2, full_rows=None)
    replicated = len(stages[stage]) > 1
    flat = torch.zeros(100, device=bench.device)
    reducer = transport.group(stage).reducer(flat, [(50, 100), (0, 50)]) if replicated else None
    for minibatch in range(12):
        tensor = torch.arange(8.0, device=bench.device) + minibatch
        if minibatch % len(stages[stage]) == replica:
            if stage > 0:
                receiver = inward[minibatch % len(stages[stage - 1])]
                message = receiver.receive(minibatch=minibatch)
                (received,) = message.tensors
                bench.settle()
                assert received is not None
                assert torch.equal(received, tensor)
                receiver.release(message)
            if stage < len(stages) - 1:
                outward[minibatch % len(stages[stage + 1])].send((tensor,), minibatch=minibatch)
        if reducer is not None and minibatch % len(stages[stage]) == len(stages[stage]) - 1:
            bench.settle()
            flat.fill_(float(minibatch + 10 * replica))
            reducer.begin()
            reducer.ready(1)
            reducer.ready(0)
            reducer.finish(f"the all-reduce of stage {stage}, minibatch {minibatch}")
            bench.settle()
            assert flat.tolist() == [2.0 * minibatch + 10.0] * 100
    transport.finish()


def channels_between_the_same_two_ranks_keep_apart(bench: Bench) -> None:
    """Three stages whose replicas lie on the first two ranks, crosswise; every replica sends to every other."""
    stages = [[0, 1], [1, 0], [0, 1]]
    transport = bench.transport(ranks_of_stage=stages)
    rank, pairs = bench.world.rank, list(itertools.product((0, 1), (0, 1), (0, 1)))
    receivers = {
        (first, source, destination): transport.receiver(channel(first, source, first + 1, destination), depth=2)
        for first, source, destination in pairs
        if stages[first + 1][destination] == rank
    }
    senders = {
        (first, source, destination): transport.sender(
            channel(first, source, first + 1, destination), depth=2, full_rows=None
        )
        for first, source, destination in pairs
        if stages[first][source] == rank
    }

    def content(which: tuple[int, int, int], minibatch: int) -> Tensor:
        first, source, destination = which
        return torch.full((3,), float(1000 * first + 100 * source + 10 * destination + minibatch))

    for minibatch in range(4):
        for which, sender in senders.items():
            sender.send((content(which, minibatch).to(bench.device),), minibatch=minibatch)
        for which, receiver in receivers.items():
            message = receiver.receive(minibatch=minibatch)
            bench.settle()
            (received,) = message.tensors
            assert received is not None
            assert torch.equal(received.cpu(), content(which, minibatch)), (which, received)
            receiver.release(message)
    transport.finish()


def channel(source: int, source_replica: int, destination: int, destination_replica: int) -> ChannelId:
    return ChannelId(
        source=source,
        source_replica=source_replica,
        destination=destination,
        destination_replica=destination_replica,
        kind=Kind.ACTIVATION,
    )


def one_rank_may_hold_replicas_of_several_stages(bench: Bench) -> None:
    everybody = list(range(bench.world.size))
    transport = bench.transport(ranks_of_stage=[everybody, everybody[::-1]])
    groups = [transport.group(stage) for stage in (0, 1)]
    assert [group.index for group in groups] == [bench.world.rank, bench.world.size - 1 - bench.world.rank]
    for stage, group in enumerate(groups):
        rows = group.gather(np.array([float(bench.world.rank)]), "a row")
        assert rows[:, 0].tolist() == [float(rank) for rank in (everybody, everybody[::-1])[stage]]
    transport.finish()


def averages_are_means_of_what_has_one_and_the_firsts_of_others(bench: Bench) -> None:
    team, size = Team(bench), bench.world.size

    def tensors(rank: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(rank)
        numbers = [
            torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)
            for shape in ((3, 4), (), (0, 2), (5,))
        ]
        return [
            torch.tensor(10 + rank),
            *numbers,
            torch.randn(3, generator=generator, dtype=torch.complex64),
            torch.randn(2, 3, generator=generator).T,
            torch.tensor([True, rank > 0]),
            torch.arange(3, dtype=torch.uint8) + rank,
            torch.empty(0, dtype=torch.int64),
        ]

    own = [tensor.to(bench.device) for tensor in tensors(bench.world.rank)]
    averages = team.group.average(own, "the buffers of stage 0")
    for index, (got, mine) in enumerate(zip(averages, own, strict=True)):
        parts = [tensors(rank)[index] for rank in range(size)]
        if parts[0].is_floating_point() or parts[0].is_complex():
            total = parts[0].to(torch.complex128 if parts[0].is_complex() else torch.float64)
            for part in parts[1:]:
                total = total + part
            expected = (
                torch.view_as_complex(torch.view_as_real(total) / size) if total.is_complex() else total / size
            )
        else:
            expected = parts[0]
        assert (got.dtype, got.shape, got.device) == (mine.dtype, mine.shape, mine.device)
        assert bits(got) == bits(expected.to(got.dtype)), (index, got, expected)
        assert torch.equal(mine.cpu(), parts[bench.world.rank])
        assert not got.numel() or got.data_ptr() != mine.data_ptr()
    assert team.group.average([], "nothing") == []
    team.finish()


def an_average_goes_piece_by_piece(bench: Bench) -> None:
    team = Team(bench, chunk_bytes=1000)
    numel, world = 2 * AVERAGED_AT_ONCE + 3, bench.world
    numbers = torch.arange(numel, dtype=torch.float64, device=bench.device) * (world.rank + 1)
    flags = torch.arange(numel, device=bench.device) + world.rank
    mean, first = team.group.average([numbers, flags], "the buffers of stage 0")
    factor = sum(range(1, world.size + 1))
    assert torch.equal(mean.cpu(), torch.arange(numel, dtype=torch.float64) * factor / world.size)
    assert torch.equal(first.cpu(), torch.arange(numel))
    team.finish()


def an_average_sees_what_the_device_has_still_to_compute(bench: Bench) -> None:
    team = Team(bench)
    team.fill(torch.full((1003,), float(bench.world.rank)))
    (mean,) = team.group.average([team.flat], "the buffers of stage 0")
    assert mean.tolist() == [(bench.world.size - 1) / 2] * 1003
    team.finish()


def replicas_that_bring_different_tensors_are_named(bench: Bench) -> None:
    team, rank = Team(bench), bench.world.rank
    last = bench.world.size - 1
    said = error_of(
        lambda: team.group.average(
            [torch.zeros(3 if rank == last else 2)], "the average of the buffers of stage 0"
        )
    )
    named, other = (0, last) if rank == last else (last, rank)
    assert said == (
        f"the average of the buffers of stage 0: replica {named} of stage 0 brings tensors of other shapes or "
        f"dtypes than replica {other}"
    )
    said = error_of(lambda: team.group.reducer(team.flat, [(0, 5 if rank == last else 6)]))
    assert f"replica {named} of stage 0 brings another tensor or other buckets to sum" in said
    team.finish()


def a_bucket_that_never_became_ready_is_named(bench: Bench) -> None:
    team, rank = Team(bench), bench.world.rank
    team.reducer.begin()
    for bucket in (0, 1, 2, 4):
        team.reducer.ready(bucket)
    said = error_of(lambda: team.reducer.finish("the all-reduce of stage 0, minibatch 7"))
    assert said == (
        f"rank {rank} ends the all-reduce of stage 0, minibatch 7: bucket 3 (elements 16 to 17) never became ready"
    )
    team.reducer.ready(3)
    team.reducer.finish("the all-reduce")
    team.finish()


def a_stop_leaves_no_sum_in_the_middle(bench: Bench) -> None:
    team, rank = Team(bench), bench.world.rank
    team.reducer.begin()
    team.reducer.ready(1)
    said = error_of(lambda: team.transport.finish(discard=True))
    assert said == (
        f"rank {rank}: an all-reduce of stage 0 is left in the middle: bucket 1 (elements 300 to 900) may have "
        "started"
    )
    for bucket in (0, 2, 3, 4):
        team.reducer.ready(bucket)
    team.reducer.finish("the all-reduce")
    # A round in which nothing has become ready leaves nothing behind.
    team.reducer.begin()
    team.transport.finish(discard=True)


def a_group_is_made_once_and_for_its_ranks(bench: Bench) -> None:
    last = bench.world.size - 1
    stages = [list(range(bench.world.size)), [last]]
    transport = bench.transport(ranks_of_stage=stages)
    group: StageGroup = transport.group(0)
    assert transport.group(0) is group
    assert (group.size, group.index, group.stage) == (bench.world.size, bench.world.rank, 0)
    assert "not one of several replicas of stage 1" in error_of(lambda: transport.group(1))
    said = error_of(lambda: group.gather(np.zeros(2, np.float32), "a row"))
    assert said == "replicas gather rows of float64, not float32 (2,)"
    transport.finish()


def ranks_that_join_different_stages_are_named(bench: Bench) -> None:
    everybody = list(range(bench.world.size))
    transport = bench.transport(ranks_of_stage=[everybody, everybody])
    said = error_of(lambda: transport.group(0 if bench.world.rank == 0 else 1))
    size = bench.world.size
    other = "rank 1 the 2 of stage 1" if bench.world.rank == 0 else "rank 0 the 2 of stage 0"
    assert f"but {other.replace(' 2 ', f' {size} ')}" in said, said
    transport.finish()


def many_transports_may_follow_one_another(bench: Bench) -> None:
    for _ in range(30):
        team = Team(bench, numel=4, buckets=[(0, 4)])
        team.round(0)
        team.finish()


PER_MEMORY: tuple[Callable[[Bench], None], ...] = (
    all_replicas_get_the_same_bits,
    sums_of_two_are_a_plus_b_to_the_bit,
    replicas_may_have_their_buckets_ready_in_different_orders,
    buckets_are_cut_at_the_limit,
    a_bucket_may_be_empty_and_elements_may_be_left_out,
    large_buckets_are_summed,
    the_transport_moves_sums_that_nobody_waits_for,
    a_gather_may_come_before_or_behind_the_start_of_a_sum,
    two_all_reduces_of_a_stage_do_not_meet,
    stages_sum_at_the_same_time_while_messages_cross,
    channels_between_the_same_two_ranks_keep_apart,
    averages_are_means_of_what_has_one_and_the_firsts_of_others,
    an_average_sees_what_the_device_has_still_to_compute,
    a_bucket_that_never_became_ready_is_named,
    a_stop_leaves_no_sum_in_the_middle,
)
ONCE: tuple[Callable[[Bench], None], ...] = (
    one_rank_may_hold_replicas_of_several_stages,
    an_average_goes_piece_by_piece,
    replicas_that_bring_different_tensors_are_named,
    a_group_is_made_once_and_for_its_ranks,
    ranks_that_join_different_stages_are_named,
    many_transports_may_follow_one_another,
)


CASES = Cases(ONCE, PER_MEMORY)


if __name__ == "__main__":
    sys.exit(run_job(lambda world: CASES.run(world, sys.argv[1:] or ["host", "aware", "staged"])))
