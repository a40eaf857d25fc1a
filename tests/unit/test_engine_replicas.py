"""Several replicas of a stage: whose gradients are summed, when a bucket is ready, and what is exchanged."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hpcpipe.engine.passes import Passes
from hpcpipe.engine.replicas import Buckets, Replicas, _as_numbers, _from_numbers
from hpcpipe.engine.weights import WeightBuffer, WeightStore
from hpcpipe.optim.flat import FlatLayout
from tests.oracle.nets import Tied
from tests.unit.engine_cases import CPU, seeded, stage_of, store_of
from tests.unit.replica_cases import FakeGroup, together

TINY = 64
"""Bytes of a bucket that holds few parameters."""


class Pass(torch.autograd.Function):
    """Passes on what it gets, and calls back when the backward pass comes by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return gradient, None


class Noting(nn.Module):
    """A linear map that says when a backward pass has come to it."""

    def __init__(self, width: int, note: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.note = note

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(Pass.apply(self.linear(x), self.note))


class Choice(nn.Module):
    """Three scales of which a row takes the first, the second or none; the third is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.full((3,), 2.0) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        which = int(x[0, 0])
        return x * self.scales[which] if which in (0, 1) else x * 1.0


def net(note: Callable[[int], None] = lambda layer: None) -> list[nn.Module]:
    return [seeded(lambda i=i: Noting(6, lambda: note(i)), seed=i) for i in range(4)]


def copies(size: int, build: Callable[[], list[nn.Module]] = net) -> list[list[nn.Module]]:
    """The layers of each replica, made before there are threads, which would share the random generator."""
    return [build() for _ in range(size)]


def data(seed: int, rows: int = 3) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed))


class Worker:
    """A stage as one replica has it."""

    def __init__(self, group: FakeGroup, layers: Sequence[nn.Module], *, bucket_bytes: int = TINY) -> None:
        self.stage = stage_of(*layers)
        self.store = store_of(self.stage)
        self.passes = Passes(self.stage, keep_derived=False)
        self.between = 0
        self.replicas = Replicas(group, self.store, bucket_bytes=bucket_bytes, device=CPU, between=self._count)

    def _count(self) -> None:
        self.between += 1

    def backward(self, inputs: Tensor, *, last: bool = True) -> tuple[Tensor | None, ...]:
        with self.replicas.backward(last=last):
            return gradients_of(self.passes, self.store.versions[self.store.newest], inputs)

    def reduce(self, *facts: float) -> tuple[list[Tensor | None], np.ndarray]:
        rows = self.replicas.reduce(facts, "the round")
        return [None if g is None else g.clone() for g in self.replicas.gradients], rows


def gradients_of(passes: Passes, weights: WeightBuffer, inputs: Tensor) -> tuple[Tensor | None, ...]:
    """What autograd has for each weight; the loss is the mean square of the outputs."""
    done = passes.forward(
        0, 0, (inputs,), weights, substitute=False, head=lambda outputs: outputs[0].square().mean()
    )
    return passes.backward(done, weights, None)[1]


def serially(layers: Sequence[nn.Module], inputs: Iterable[Tensor]) -> list[list[Tensor | None]]:
    """The gradients of each input alone, without replicas."""
    stage = stage_of(*layers)
    store, passes = store_of(stage), Passes(stage, keep_derived=False)
    return [[None if g is None else g.clone() for g in gradients_of(passes, store.versions[0], x)] for x in inputs]


def summed(parts: Iterable[Sequence[Tensor | None]]) -> list[Tensor | None]:
    """Sums in order, None where no part has a gradient."""
    totals: list[Tensor | None] = []
    for alike in zip(*parts, strict=True):
        present = [gradient for gradient in alike if gradient is not None]
        totals.append(torch.stack(present).sum(0) if len(present) > 1 else next(iter(present), None))
    return totals


def assert_equal(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    assert [g is None for g in found] == [g is None for g in expected]
    for ours, theirs in zip(found, expected, strict=True):
        if ours is not None and theirs is not None:
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("bucket_bytes", [1, TINY, 10**9])
def test_the_gradients_of_two_replicas_are_the_sum_of_both_to_the_bit(bucket_bytes: int) -> None:
    layers = copies(2)

    def work(group: FakeGroup) -> list[Tensor | None]:
        worker = Worker(group, layers[group.index], bucket_bytes=bucket_bytes)
        worker.backward(data(group.index))
        return worker.reduce()[0]

    found = together(2, work)

    for gradients in found:
        assert_equal(gradients, summed(serially(net(), [data(0), data(1)])))


def test_an_update_by_half_their_sum_is_one_by_their_mean() -> None:
    layers = copies(2)

    def work(group: FakeGroup) -> Tensor:
        worker = Worker(group, layers[group.index])
        worker.backward(data(group.index))
        worker.reduce()
        worker.store.update(1, worker.replicas.gradients, (), grad_scale=0.5)
        return worker.store.versions[2].flat

    found = together(2, work)

    one, other = serially(net(), [data(0), data(1)])
    alone = store_of(stage_of(*net()))
    alone.update(1, [(g + h) / 2 for g, h in zip(one, other, strict=True) if g is not None], ())
    assert torch.equal(found[0], alone.versions[2].flat)
    assert torch.equal(found[1], alone.versions[2].flat)


def test_microbatches_add_up_on_each_replica_before_the_replicas_do() -> None:
    shares = [[0, 2, 4], [1, 3]]

    layers = copies(2)

    def work(group: FakeGroup) -> list[Tensor | None]:
        worker = Worker(group, layers[group.index])
        own = shares[group.index]
        for seed in own:
            worker.backward(data(seed), last=seed == own[-1])
        return worker.reduce()[0]

    found = together(2, work)

    alone = serially(net(), map(data, range(5)))
    parts = [[alone[seed] for seed in own] for own in shares]
    expected = [
        (one + two + three) + (four + five)
        for (one, two, three), (four, five) in zip(
            zip(*parts[0], strict=True), zip(*parts[1], strict=True), strict=True
        )
    ]
    for gradients in found:
        assert_equal(gradients, expected)


def test_a_replica_without_a_pass_in_the_round_brings_zeros() -> None:
    layers = copies(3)

    def work(group: FakeGroup) -> list[list[Tensor | None]]:
        worker = Worker(group, layers[group.index])
        worker.backward(data(group.index))
        worker.reduce()
        if group.index < 2:
            worker.backward(data(7 + group.index))
        return [worker.reduce()[0], worker.reduce()[0]]

    found = together(3, work)

    for last_round, empty_round in found:
        assert_equal(last_round, summed(serially(net(), [data(7), data(8)])))
        assert empty_round == [None] * 8


def test_a_parameter_has_no_gradient_only_where_no_replica_has_one() -> None:
    """In the second round the other of the two has one, and what the first has left behind counts no more."""
    rounds = [[0, 2], [2, 1], [1, 0], [2, 2]]

    def rows(which: int) -> Tensor:
        return torch.tensor([[float(which), 1.0, 3.0]])

    def work(group: FakeGroup) -> list[list[Tensor | None]]:
        worker = Worker(group, [Choice()], bucket_bytes=1)
        found = []
        for round_ in rounds:
            worker.backward(rows(round_[group.index]))
            found.append(worker.reduce()[0])
        return found

    one, other = together(2, work)

    for round_, ours, theirs in zip(rounds, one, other, strict=True):
        expected = summed(serially([Choice()], map(rows, round_)))
        assert_equal(ours, expected)
        assert_equal(theirs, expected)
    assert [[g is None for g in gradients] for gradients in one] == [
        [False, True, True],
        [True, False, True],
        [False, False, True],
        [True, True, True],
    ]


def test_a_gradient_of_an_earlier_microbatch_alone_counts() -> None:
    def work(group: FakeGroup) -> list[Tensor | None]:
        worker = Worker(group, [Choice()], bucket_bytes=1)
        worker.backward(torch.tensor([[1.0, 4.0, 5.0]]), last=False)
        worker.backward(torch.tensor([[0.0, 1.0, 2.0]]), last=True)
        return worker.reduce()[0]

    found = together(1, work)[0]

    assert_equal(
        found, summed(serially([Choice()], [torch.tensor([[1.0, 4.0, 5.0]]), torch.tensor([[0.0, 1.0, 2.0]])]))
    )


def test_a_bucket_is_ready_as_soon_as_its_gradients_are_while_the_backward_pass_goes_on() -> None:
    def work(group: FakeGroup) -> list[str]:
        worker = Worker(group, net(lambda layer: group.log.append(f"layer {layer}")), bucket_bytes=(36 + 6) * 4)
        assert group.sums is not None
        assert len(group.sums.buckets) == 4
        worker.backward(data(0), last=False)
        group.log.append("last")
        worker.backward(data(1), last=True)
        return group.log

    log = together(1, work)[0]

    early = [f"layer {layer}" for layer in (3, 2, 1, 0)]
    assert log[:5] == [*early, "last"]
    in_order = [name for pair in zip(early, (f"bucket {b}" for b in range(4)), strict=True) for name in pair]
    assert log[5:] == in_order


def test_sums_are_looked_after_from_the_thread_that_computes() -> None:
    layers = copies(1)

    def work(group: FakeGroup) -> tuple[set[int], int, int]:
        worker = Worker(group, layers[group.index])
        worker.backward(data(0))
        assert group.sums is not None
        return group.sums.threads, threading.get_ident(), worker.between

    threads, mine, between = together(1, work)[0]

    assert threads == {mine}
    assert between == 8


def test_autograd_keeps_no_copy_of_a_gradient_that_has_been_added() -> None:
    layers = copies(1)

    def work(group: FakeGroup) -> list[int]:
        worker = Worker(group, layers[group.index])
        left = worker.backward(data(0))
        return [gradient.untyped_storage().nbytes() for gradient in left if gradient is not None]

    assert together(1, work)[0] == [4] * 8


def test_a_weight_that_is_used_twice_counts_once_with_its_whole_gradient() -> None:
    def build() -> list[nn.Module]:
        return [seeded(lambda: Tied(6))]

    layers = copies(2, build)

    def work(group: FakeGroup) -> list[Tensor | None]:
        worker = Worker(group, layers[group.index])
        worker.backward(data(group.index))
        return worker.reduce()[0]

    found = together(2, work)

    assert_equal(found[0], summed(serially(build(), [data(0), data(1)])))


def test_gradients_of_versions_made_later_go_the_same_way_and_nothing_is_allocated() -> None:
    layers = copies(2)

    def work(group: FakeGroup) -> set[int]:
        worker = Worker(group, layers[group.index])
        places = set()
        for j in range(5):
            worker.backward(data(2 * j + group.index))
            gradients, _ = worker.reduce()
            assert all(gradient is not None for gradient in gradients)
            places.add(sum(g.data_ptr() for g in worker.replicas.gradients if g is not None))
            older = worker.store.newest
            worker.store.update(2 * j + 1, worker.replicas.gradients, (), grad_scale=0.5)
            worker.store.release([older] if j else [])
        return places

    assert all(len(places) == 1 for places in together(2, work))


def test_gradients_in_bfloat16_are_summed_in_float32() -> None:
    def bf16(layers: list[nn.Module]) -> tuple[WeightStore, Passes]:
        stage = stage_of(*layers)
        full = store_of(stage)
        store = WeightStore(full.layout, rule=full._rule, horizon=full._horizon, device=CPU, dtype=torch.bfloat16)
        store.start_from(0, full.layout.views(full.versions[0].flat), updates=0)
        return store, Passes(stage, keep_derived=False)

    layers = copies(2)

    def work(group: FakeGroup) -> list[Tensor | None]:
        store, passes = bf16(layers[group.index])
        replicas = Replicas(group, store, bucket_bytes=TINY, device=CPU, between=lambda: None)
        for seed in (0, 1):
            with replicas.backward(last=seed == 1):
                gradients_of(passes, store.versions[0], data(2 * group.index + seed).bfloat16())
        replicas.reduce((), "the round")
        return [None if g is None else g.clone() for g in replicas.gradients]

    found = together(2, work)[0]

    store, passes = bf16(net())
    parts = [
        [g.float() for g in gradients_of(passes, store.versions[0], data(seed).bfloat16()) if g is not None]
        for seed in range(4)
    ]
    expected = [(a + b) + (c + d) for a, b, c, d in zip(*parts, strict=True)]
    assert_equal(found, expected)
    assert any(not torch.equal(g, g.bfloat16().float()) for g in expected)


def test_every_replica_hears_the_facts_of_all() -> None:
    layers = copies(3)

    def work(group: FakeGroup) -> np.ndarray:
        worker = Worker(group, layers[group.index])
        worker.backward(data(group.index))
        return worker.reduce(0.5 + group.index, 7.0, float(2**41 + group.index))[1]

    for rows in together(3, work):
        assert rows.tolist() == [[0.5 + q, 7.0, 2.0**41 + q] for q in range(3)]


def test_a_stage_without_parameters_exchanges_facts_alone() -> None:
    def work(group: FakeGroup) -> np.ndarray:
        worker = Worker(group, [nn.Tanh()])
        worker.backward(data(group.index).requires_grad_())
        return worker.reduce(float(group.index))[1]

    assert together(2, work)[0].tolist() == [[0.0], [1.0]]


def test_buffers_are_averaged_into_new_tensors_by_name() -> None:
    def work(group: FakeGroup) -> tuple[dict[str, Tensor], Tensor]:
        worker = Worker(group, [nn.Tanh()])
        mean = torch.tensor([1.0 + group.index, 4.0])
        count = torch.tensor(5 + group.index)
        return worker.replicas.average({"mean": mean, "count": count}, "the buffers"), mean

    for index, (found, own) in enumerate(together(2, work)):
        assert torch.equal(found["mean"], torch.tensor([1.5, 4.0]))
        assert int(found["count"]) == 5
        assert torch.equal(own, torch.tensor([1.0 + index, 4.0]))


SHAPES = st.lists(st.integers(0, 70), min_size=1, max_size=12)


@given(numels=SHAPES, bucket_bytes=st.integers(1, 600))
@settings(max_examples=60, deadline=None)
def test_buckets_cover_every_parameter_once_from_the_last_to_the_first(
    numels: list[int], bucket_bytes: int
) -> None:
    layout = FlatLayout([(str(i), (n,), 0) for i, n in enumerate(numels)])
    buckets = Buckets(layout, bucket_bytes)

    starts, ends = [start for start, _ in buckets.ranges], [end for _, end in buckets.ranges]
    assert ends == [layout.numel, *starts[:-1]]
    assert starts[-1] == 0
    for slot, bucket in zip(layout.slots, buckets.of_slot, strict=True):
        assert starts[bucket] <= slot.offset
        assert slot.offset + slot.numel <= ends[bucket]
    # Every bucket but the last is large enough, and would not be without the parameter that comes first in it.
    for bucket, (start, end) in enumerate(buckets.ranges[:-1]):
        assert 4 * (end - start) >= bucket_bytes // 4 * 4
        first = buckets.of_slot.index(bucket)
        after = layout.slots[first + 1].offset if first + 1 < len(layout.slots) else layout.numel
        assert 4 * (end - min(after, end)) < max(4, bucket_bytes)
    assert sum(buckets.sizes()) == len(numels)


@given(
    rows=st.integers(1, 100).flatmap(
        lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=1, max_size=4)
    )
)
def test_presence_in_any_replica_survives_the_row_of_numbers(rows: list[list[bool]]) -> None:
    sent = np.array([_as_numbers(np.array(row)) for row in rows])

    assert _from_numbers(sent, len(rows[0])).tolist() == [any(bits) for bits in zip(*rows, strict=True)]
