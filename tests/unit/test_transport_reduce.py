"""Bucket by bucket sums with an adder inside this process: what starts when, and which memory MPI is given."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from hpcpipe.errors import TransportError
from hpcpipe.transport.buffers import AwareMemory, HostMemory, Memory, StagedMemory
from hpcpipe.transport.reduce import BucketReduce, check
from hpcpipe.transport.wait import Waiter
from tests.mpi.fake_adder import FakeAdder
from tests.mpi.fake_device import FakeDevice

BUCKETS = [(6, 10), (2, 6), (0, 2)]


class Bench:
    """A reducer of ten numbers in three buckets."""

    def __init__(
        self,
        memory: Memory | None = None,
        *,
        buckets: Sequence[tuple[int, int]] = BUCKETS,
        dtype: torch.dtype = torch.float32,
        limit: int = 1 << 20,
    ) -> None:
        self.adder = FakeAdder()
        self.flat = torch.arange(10, dtype=dtype)
        self.waiter = Waiter(rank=3, warn_after_s=0.05, abort_after_s=0.1, log=lambda line: None)
        in_place = (memory or HostMemory()).in_place(self.flat)
        self.reducer = BucketReduce(self.adder, in_place, self.waiter, self.flat, buckets, limit=limit)

    def started(self) -> list[tuple[int, int]]:
        """The first element and the number of elements of every sum that has started."""
        start, size = self.flat.data_ptr(), self.flat.element_size()
        return [((address - start) // size, count) for address, count in self.adder.started]

    def round(self) -> None:
        self.reducer.begin()
        for bucket in range(self.reducer.buckets):
            self.reducer.ready(bucket)
        self.reducer.finish("the all-reduce of stage 1, minibatch 7")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_round_replaces_the_numbers_by_their_sums(dtype: torch.dtype) -> None:
    bench = Bench(dtype=dtype)

    bench.round()
    bench.round()

    assert torch.equal(bench.flat, 4 * torch.arange(10, dtype=dtype))


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0], [1, 0, 2]])
def test_buckets_start_in_their_own_order(order: list[int]) -> None:
    bench = Bench()
    bench.reducer.begin()

    for bucket in order:
        bench.reducer.ready(bucket)

    assert bench.started() == [(6, 4), (2, 4), (0, 2)]


def test_a_bucket_starts_as_soon_as_it_is_ready_and_the_earlier_ones_have_started() -> None:
    bench = Bench()
    bench.reducer.begin()

    bench.reducer.ready(0)
    assert bench.started() == [(6, 4)]
    bench.reducer.ready(2)
    assert bench.started() == [(6, 4)]
    bench.reducer.ready(1)
    assert bench.started() == [(6, 4), (2, 4), (0, 2)]


def test_a_bucket_is_cut_into_pieces_at_the_limit() -> None:
    bench = Bench(buckets=[(3, 10), (0, 3), (3, 3)], limit=3)

    bench.round()

    assert bench.started() == [(3, 3), (6, 3), (9, 1), (0, 3)]
    assert torch.equal(bench.flat, 2.0 * torch.arange(10))


def test_a_bucket_that_a_thread_of_autograd_has_made_ready_starts_from_the_main_thread() -> None:
    bench = Bench()
    bench.reducer.begin()
    thread = threading.Thread(target=lambda: bench.reducer.ready(0))
    thread.start()
    thread.join()
    assert bench.started() == []

    bench.reducer.progress()

    assert bench.started() == [(6, 4)]


@pytest.mark.parametrize("strategy", [AwareMemory, StagedMemory], ids=["aware", "staged"])
def test_a_sum_on_a_device_starts_only_behind_the_kernels_that_fill_its_bucket(
    strategy: type[AwareMemory] | type[StagedMemory],
) -> None:
    device = FakeDevice()
    bench = Bench(strategy(device))
    for _ in range(3):
        device.queue(lambda: bench.flat.add_(1.0))
    bench.reducer.begin()

    bench.reducer.ready(0)
    bench.reducer.ready(1)
    looks = 0
    while not bench.adder.started:
        looks += 1
        bench.reducer.progress()
    bench.reducer.ready(2)
    bench.reducer.finish("the all-reduce")
    device.synchronize()

    assert looks >= 2
    assert "synchronize" not in device.log
    assert bench.flat.tolist() == [2.0 * (number + 3) for number in range(10)]


def test_a_cuda_aware_mpi_is_given_the_tensor_itself() -> None:
    bench = Bench(AwareMemory(FakeDevice()))

    bench.round()

    assert bench.started() == [(6, 4), (2, 4), (0, 2)]


def test_a_staged_sum_changes_the_tensor_only_by_a_copy_in_the_order_of_the_stream() -> None:
    device = FakeDevice()
    bench = Bench(StagedMemory(device))

    bench.round()

    assert all(not 0 <= first < 10 for first, _ in bench.started())
    assert bench.flat[1] == 1.0
    seen: list[list[float]] = []
    device.queue(lambda: seen.append(bench.flat.tolist()))
    device.synchronize()
    assert seen == [[2.0 * number for number in range(10)]]


def test_a_staged_bucket_is_copied_back_before_later_ones_are_done() -> None:
    device = FakeDevice()
    bench = Bench(StagedMemory(device))
    bench.reducer.begin()
    bench.reducer.ready(0)
    for _ in range(3):
        bench.reducer.progress()

    device.synchronize()

    assert bench.flat.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 12.0, 14.0, 16.0, 18.0]


@pytest.mark.parametrize("strategy", [AwareMemory, StagedMemory], ids=["aware", "staged"])
def test_rounds_behind_the_first_take_no_new_memory(strategy: type[AwareMemory] | type[StagedMemory]) -> None:
    taken: list[int] = []

    class CountingDevice(FakeDevice):
        def allocate_pinned(self, nbytes: int) -> Tensor:
            taken.append(nbytes)
            return super().allocate_pinned(nbytes)

    bench = Bench(strategy(CountingDevice()))
    prepared = bench.adder.prepared
    for _ in range(5):
        bench.round()

    assert taken == ([40] if strategy is StagedMemory else [])
    assert bench.adder.prepared == prepared == 3


def test_rounds_leave_nothing_behind_in_python_either() -> None:
    bench = Bench(limit=1)
    for _ in range(3):
        bench.round()
    bench.adder.started.clear()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(50):
            bench.round()
            bench.adder.started.clear()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()

    assert grown < 2000


def test_a_bucket_that_never_became_ready_is_named() -> None:
    bench = Bench()
    bench.reducer.begin()
    bench.reducer.ready(0)

    with pytest.raises(
        TransportError,
        match=r"rank 3 ends the all-reduce of stage 1: bucket 1 \(elements 2 to 6\) never became ready",
    ):
        bench.reducer.finish("the all-reduce of stage 1")


def test_a_bucket_cannot_become_ready_twice() -> None:
    bench = Bench()
    bench.reducer.begin()
    bench.reducer.ready(1)

    with pytest.raises(
        TransportError, match=r"rank 3: bucket 1 \(elements 2 to 6\) became ready twice in a round"
    ):
        bench.reducer.ready(1)


def test_nothing_is_ready_or_finished_outside_of_a_round() -> None:
    bench = Bench()

    with pytest.raises(TransportError, match=r"bucket 0 \(elements 6 to 10\) is ready outside of a round"):
        bench.reducer.ready(0)
    with pytest.raises(TransportError, match="rank 3 ends the all-reduce of stage 1: it never began"):
        bench.reducer.finish(lambda: "the all-reduce of stage 1")


def test_a_round_ends_before_the_next_begins() -> None:
    bench = Bench()
    bench.reducer.begin()

    with pytest.raises(TransportError, match="a round of sums began before the last one had ended"):
        bench.reducer.begin()


def test_a_round_with_a_ready_bucket_is_left_in_the_middle() -> None:
    bench = Bench()
    assert bench.reducer.left is None
    bench.reducer.begin()
    assert bench.reducer.left is None

    bench.reducer.ready(1)
    assert bench.reducer.left == "bucket 1 (elements 2 to 6)"

    bench.reducer.ready(0)
    bench.reducer.ready(2)
    bench.reducer.finish("the all-reduce")
    assert bench.reducer.left is None


def test_a_sum_that_does_not_end_is_told_with_its_name() -> None:
    bench = Bench()
    bench.adder.may_end = False

    with pytest.raises(TransportError, match="rank 3 waited for the all-reduce of stage 1, minibatch 7 for"):
        bench.round()

    assert bench.waiter.waited_s["all-reduce"] > 0


def test_the_wait_for_a_sum_goes_to_its_own_account() -> None:
    bench = Bench()
    bench.adder.may_end = False
    bench.waiter.idle.append(lambda: setattr(bench.adder, "may_end", True))

    bench.round()

    assert list(bench.waiter.waited_s) == ["all-reduce"]


@pytest.mark.parametrize(
    ("flat", "words"),
    [
        (torch.zeros(4, dtype=torch.bfloat16), r"torch.bfloat16 \(4,\)"),
        (torch.zeros(2, 2), r"torch.float32 \(2, 2\)"),
        (torch.zeros(8)[::2], r"torch.float32 \(4,\)"),
    ],
    ids=["dtype", "dimensions", "gaps"],
)
def test_a_tensor_that_cannot_be_summed_in_place_is_refused(flat: Tensor, words: str) -> None:
    with pytest.raises(TransportError, match=f"float32 or float64 tensor of one dimension, not {words}"):
        check(flat, [])


@pytest.mark.parametrize(
    ("buckets", "words"),
    [
        ([(0, 3), (2, 4)], "elements 2 to 4"),
        ([(0, 5)], "elements 0 to 5"),
        ([(-1, 2)], "elements -1 to 2"),
        ([(3, 2)], "elements 3 to 2"),
    ],
    ids=["overlap", "too long", "negative", "backwards"],
)
def test_buckets_that_do_not_fit_are_refused(buckets: list[tuple[int, int]], words: str) -> None:
    with pytest.raises(TransportError, match=words):
        check(torch.zeros(4), buckets)


def test_a_tensor_elsewhere_than_the_transport_is_refused() -> None:
    with pytest.raises(TransportError, match="a tensor on meta given to a transport for the CPU"):
        HostMemory().in_place(torch.zeros(4, device="meta"))
    with pytest.raises(TransportError, match="a tensor on meta given to a transport for cpu"):
        StagedMemory(FakeDevice()).in_place(torch.zeros(4, device="meta"))
