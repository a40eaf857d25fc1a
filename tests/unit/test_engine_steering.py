"""When a run cuts and stops, and how the ranks come to the same answer."""

from __future__ import annotations

import random
import signal
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcpipe.engine.steering import STOP_FILE, TIME_IS_UP, CutMark, Steering, StopRequest, longest_stop
from hpcpipe.schedule import Action, Op, Place, Schedule, rank_actions

BY_SIGNAL = StopRequest(cause=signal.SIGTERM, rank=2)


def steering_of(
    last: int,
    every: int = 0,
    *,
    replicas: tuple[int, ...] = (),
    stages: int = 3,
    drain_every: int = 0,
    **more: Any,
) -> Steering:
    """The steering of a `pipedream` run whose last minibatch is `last`."""
    schedule = Schedule(
        name="pipedream",
        stages=len(replicas) or stages,
        minibatches=last + 1,
        replicas=replicas,
        drain_every=drain_every,
    )
    return Steering(schedule, every=every, **more)


def _pass_on(sender: Steering, receiver: Steering) -> None:
    receiver.arrived_with_activation(sender.activation_word())


@given(minibatch=st.integers(0, 2**40), stop=st.booleans())
def test_a_mark_survives_its_word(minibatch: int, stop: bool) -> None:
    mark = CutMark(minibatch=minibatch, stop=stop)

    assert CutMark.from_word(mark.word()) == mark


@given(cause=st.integers(1, 255), rank=st.integers(0, 2**30))
def test_a_request_survives_its_word_also_as_a_floating_point_number(cause: int, rank: int) -> None:
    request = StopRequest(cause=cause, rank=rank)

    assert StopRequest.from_word(int(float(request.word()))) == request


def test_the_word_0_is_no_mark_and_no_request() -> None:
    assert CutMark.from_word(0) is None
    assert StopRequest.from_word(0) is None


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (signal.SIGUSR1, "SIGUSR1 at rank 3"),
        (signal.SIGRTMIN + 2, f"signal {signal.SIGRTMIN + 2} at rank 3"),
        (STOP_FILE, "the file STOP"),
        (TIME_IS_UP, "the time limit (run.stop_before)"),
    ],
)
def test_a_request_says_what_asked(cause: int, words: str) -> None:
    assert str(StopRequest(cause=cause, rank=3)) == words


def test_a_request_at_any_stage_reaches_the_first_on_gradients_and_comes_back_on_activations() -> None:
    first, middle, last = (steering_of(999) for _ in range(3))
    last.request(BY_SIGNAL)

    middle.arrived_with_gradient(last.gradient_word())
    first.arrived_with_gradient(middle.gradient_word())
    first.decide(17)
    _pass_on(first, middle)
    _pass_on(middle, last)

    assert {first.stop_after, middle.stop_after, last.stop_after} == {17}
    assert all(steering.cuts_at(17) for steering in (first, middle, last))


def test_a_second_request_does_not_move_a_decided_cut() -> None:
    steering = steering_of(999)
    steering.request(BY_SIGNAL)
    steering.decide(17)

    steering.request(BY_SIGNAL)
    steering.decide(18)

    assert steering.stop_after == 17
    assert not steering.cuts_at(18)


def test_a_request_after_the_last_forward_lets_the_run_end_normally() -> None:
    steering = steering_of(20)
    steering.request(BY_SIGNAL)

    steering.decide(20)

    assert steering.stop_after is None
    assert steering.cuts_at(20)


@given(every=st.integers(1, 12), oldest=st.integers(0, 60), ahead=st.integers(0, 15))
def test_a_regular_cut_is_foreseen_by_every_forward_that_will_be_in_flight_at_it(
    every: int, oldest: int, ahead: int
) -> None:
    steering = steering_of(10**9, every)
    minibatch = oldest + ahead

    expected = any(steering.cuts_at(cut) for cut in range(oldest, minibatch))

    assert steering.cut_between(oldest, minibatch) == expected


def test_a_decided_cut_is_foreseen_until_it_has_passed() -> None:
    steering = steering_of(999)
    steering.request(BY_SIGNAL)
    steering.decide(10)

    assert steering.cut_between(8, 11)
    assert not steering.cut_between(8, 10)
    steering.passed(10)
    assert not steering.cut_between(8, 11)


def test_a_mark_that_arrives_again_after_its_cut_is_not_taken_for_a_new_one() -> None:
    steering = steering_of(999)
    word = CutMark(minibatch=5, stop=False).word()
    steering.arrived_with_activation(word)
    steering.passed(5)

    steering.arrived_with_activation(word)

    assert steering.activation_word() == 0


def test_cuts_by_time_come_when_the_interval_is_over_and_count_from_the_cut_before() -> None:
    now = [0.0]
    steering = steering_of(999, seconds=lambda: 60.0, clock=lambda: now[0])
    cuts = []
    for minibatch in range(300):
        now[0] += 1.0
        steering.decide(minibatch)
        if steering.cuts_at(minibatch):
            cuts.append(minibatch)
            steering.passed(minibatch)

    assert cuts == [59, 119, 179, 239, 299]


def test_without_an_interval_time_decides_nothing() -> None:
    now = [0.0]
    steering = steering_of(999, clock=lambda: now[0])
    now[0] = 1e9

    steering.decide(3)

    assert not steering.cuts_at(3)


@pytest.mark.parametrize(("minibatch", "cut"), [(0, 9), (8, 9), (9, 9), (10, 19)])
def test_where_the_pipeline_is_drained_a_stop_waits_for_the_end_of_the_stretch(minibatch: int, cut: int) -> None:
    steering = steering_of(999, 10, drain_every=10)
    steering.request(BY_SIGNAL)

    steering.decide(minibatch)

    assert steering.stop_after == cut


def test_a_request_from_outside_is_looked_for_before_each_forward() -> None:
    answers = iter([None, None, StopRequest(cause=STOP_FILE, rank=0)])
    steering = steering_of(999, asked=lambda: next(answers))

    for minibatch in range(3):
        steering.decide(minibatch)

    assert steering.stop_after == 2


def test_the_first_replica_of_stage_0_says_what_it_obeys_and_where_it_stops_once() -> None:
    said: list[tuple[StopRequest, int]] = []
    steering = steering_of(999, taken_up=lambda request, minibatch: said.append((request, minibatch)))
    steering.decide(0)
    steering.request(BY_SIGNAL)
    steering.request(StopRequest(cause=signal.SIGUSR1, rank=0))

    for minibatch in range(1, 5):
        steering.decide(minibatch)

    assert said == [(BY_SIGNAL, 1)]


class Interrupting(int):
    """A control word in the middle of whose reading a signal arrives."""

    steering: Steering

    def __and__(self, other: int) -> int:
        self.steering.request(BY_SIGNAL)
        return int(self) & other

    def __eq__(self, other: object) -> bool:
        self.steering.request(BY_SIGNAL)
        return int(self) == other

    __hash__ = int.__hash__


def test_a_signal_that_arrives_while_a_gradient_or_an_answer_is_looked_at_is_not_lost() -> None:
    one, other = steering_of(999), steering_of(999)
    word = Interrupting(0)
    word.steering = one
    other._asked = lambda: other.request(BY_SIGNAL)  # a handler runs within, and there is no STOP file

    one.arrived_with_gradient(word)
    other.decide(3)

    assert one.requested == other.requested == BY_SIGNAL
    assert other.stop_after == 3


@given(
    replicas=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    every=st.integers(1, 12),
    oldest=st.integers(0, 60),
    ahead=st.integers(0, 20),
    last=st.integers(81, 90),
)
def test_with_replicas_a_regular_cut_is_foreseen_wherever_its_boundary_lies(
    replicas: list[int], every: int, oldest: int, ahead: int, last: int
) -> None:
    steering = steering_of(last, every, replicas=tuple(replicas))
    minibatch = oldest + ahead

    expected = any(steering.cuts_at(cut) for cut in range(oldest, minibatch))

    assert steering.cut_between(oldest, minibatch) == expected


def test_regular_cuts_wait_for_the_end_of_a_round_of_every_stage() -> None:
    steering = steering_of(20, 4, replicas=(2, 3))

    assert [k for k in range(21) if steering.cuts_at(k)] == [5, 11, 17, 20]


def test_a_request_is_obeyed_at_the_end_of_a_round_of_every_stage() -> None:
    steering = steering_of(99, replicas=(1, 2))
    steering.request(BY_SIGNAL)

    steering.decide(14)

    assert steering.stop_after == 15


def test_while_the_pipeline_fills_a_cut_waits_for_the_last_forward_that_no_exchange_precedes() -> None:
    """Three rounds of two go forward at stage 0 before its replicas speak to each other."""
    steering = steering_of(99, replicas=(2, 1, 1, 1))
    steering.request(BY_SIGNAL)

    steering.decide(0)

    assert steering.stop_after == 5


# -- words in flight: every replica hears of every cut in time ---------------------------------------------------


@dataclass
class Rank:
    """One replica at work: it passes words on and computes nothing."""

    steering: Steering
    actions: Iterator[Action]
    next: Action | None = None
    next_update: int = 0
    forwards: list[tuple[int, int, set[int]]] = field(default_factory=list)
    """(minibatch, version, cuts foreseen at it)"""
    updates: dict[int, bool] = field(default_factory=dict)
    """Whether it cut behind each update."""

    def done(self) -> bool:
        stop = self.steering.stop_after
        return self.next is None or (stop is not None and self.next_update > stop)


class Job:
    """All ranks of a schedule, in a random order that their messages allow; words travel as the engine has it."""

    def __init__(self, schedule: Schedule, seed: int, **given: Any) -> None:
        self.random = random.Random(seed)
        self.schedule = schedule
        self.decided: list[CutMark] = []
        self.entered = schedule.first - 1
        self.ranks = {
            place: Rank(
                Steering(schedule, **given), iter(rank_actions(schedule, [place])), next_update=schedule.first
            )
            for place in schedule.places
        }
        self.queues: defaultdict[tuple[Place, Place, Op], deque[int]] = defaultdict(deque)
        self.met: defaultdict[tuple[Op, int, int], set[int]] = defaultdict(set)
        for rank in self.ranks.values():
            rank.next = next(rank.actions, None)

    def run(self, *, at_step: Callable[[int], None] = lambda step: None) -> None:
        step = 0
        while waiting := [place for place, rank in self.ranks.items() if not rank.done()]:
            self.random.shuffle(waiting)
            assert any(self._try(place) for place in waiting), f"deadlock: {[self.ranks[p].next for p in waiting]}"
            step += 1
            at_step(step)

    def _try(self, place: Place) -> bool:
        rank = self.ranks[place]
        action = rank.next
        assert action is not None
        if not self._do(place, rank, action):
            return False
        rank.next = next(rank.actions, None)
        return True

    def _do(self, place: Place, rank: Rank, action: Action) -> bool:
        steering, op = rank.steering, action.op
        if op in (Op.RECEIVE_ACTIVATION, Op.RECEIVE_GRADIENT):
            sent = Op.SEND_ACTIVATION if op is Op.RECEIVE_ACTIVATION else Op.SEND_GRADIENT
            queue = self.queues[action.peer_place, place, sent]
            if not queue:
                return False
            word = queue.popleft()
            if op is Op.RECEIVE_ACTIVATION:
                steering.arrived_with_activation(word)
            else:
                steering.arrived_with_gradient(word)
        elif op is Op.SEND_ACTIVATION:
            self.queues[place, action.peer_place, op].append(steering.activation_word())
        elif op is Op.SEND_GRADIENT:
            self.queues[place, action.peer_place, op].append(steering.gradient_word())
        elif op is Op.REDUCE:
            return self._exchange(place, action)
        elif op is Op.FORWARD:
            self._forward(place, rank, action)
        elif op is Op.UPDATE:
            rank.updates[action.minibatch] = steering.cuts_at(action.minibatch)
            if rank.updates[action.minibatch]:
                steering.passed(action.minibatch)
            rank.next_update = action.minibatch + 1
        return True

    def _forward(self, place: Place, rank: Rank, action: Action) -> None:
        if place == Place(0, 0):
            before = rank.steering.activation_word()
            rank.steering.decide(action.minibatch)
            mark = CutMark.from_word(rank.steering.activation_word())
            if mark is not None and mark.word() != before:
                self.decided.append(mark)
        if place.stage == 0:
            self.entered = max(self.entered, action.minibatch)
        ahead = range(rank.next_update, action.minibatch)
        foreseen = {k for k in ahead if rank.steering.cuts_at(k)}
        assert bool(foreseen) == rank.steering.cut_between(rank.next_update, action.minibatch)
        rank.forwards.append((action.minibatch, rank.next_update, foreseen))

    def _exchange(self, place: Place, action: Action) -> bool:
        """The replicas of a stage pass their REDUCE together, with the words that each has come with."""
        others = [self.ranks[other] for other in self.schedule.places if other.stage == place.stage]
        if any(o.next is None or (o.next.op, o.next.minibatch) != (Op.REDUCE, action.minibatch) for o in others):
            return False
        words = [(o.steering.activation_word(), o.steering.gradient_word()) for o in others]
        for other in others:
            for mark, request in words:
                other.steering.arrived_with_activation(mark)
                other.steering.arrived_with_gradient(request)
            if other is not self.ranks[place]:
                other.next = next(other.actions, None)
        return True

    def check(self) -> None:
        """Every replica has cut at every mark, and every forward that was in flight at it had foreseen it."""
        for mark in self.decided:
            assert self.schedule.is_boundary(mark.minibatch)
            for place, rank in self.ranks.items():
                assert rank.updates[mark.minibatch], f"{place} does not cut at {mark}"
                for minibatch, version, foreseen in rank.forwards:
                    if version <= mark.minibatch < minibatch:
                        assert mark.minibatch in foreseen, f"{place} does F({minibatch}) without a word of {mark}"
        last = {rank.next_update for rank in self.ranks.values()}
        assert len(last) == 1
        cuts = [{k for k, cut in rank.updates.items() if cut} for rank in self.ranks.values()]
        assert all(found == cuts[0] for found in cuts)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(["pipedream", "pipedream", "gpipe", "1f1b"]))
    replicas = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    first = draw(st.integers(0, 3))
    return Schedule(
        name=name,
        stages=len(replicas),
        replicas=replicas,
        first=first,
        minibatches=first + draw(st.integers(1, 8 if name != "pipedream" else 36)),
        microbatches=draw(st.integers(1, 4)) if name != "pipedream" else 1,
        drain_every=draw(st.sampled_from([0, 0, 0, 9])) if name == "pipedream" else 0,
    )


@given(
    schedule=schedules(), seed=st.integers(0, 2**32), every=st.sampled_from([0, 0, 5]), patience=st.integers(1, 60)
)
@settings(max_examples=120, deadline=None)
def test_every_replica_hears_of_every_cut_before_its_update_and_before_forwards_that_it_finds_in_flight(
    schedule: Schedule, seed: int, every: int, patience: int
) -> None:
    """Cuts by time, at random minibatches and again and again, in random orders of the ranks' actions."""
    now = [0.0]
    job = Job(schedule, seed, every=every, seconds=lambda: float(patience), clock=lambda: now[0])

    def tick(step: int) -> None:
        now[0] += job.random.random()

    job.run(at_step=tick)
    job.check()


@given(
    schedule=schedules(),
    seed=st.integers(0, 2**32),
    share=st.floats(0, 0.9),
    patience=st.one_of(st.none(), st.integers(1, 30)),
)
@settings(max_examples=200, deadline=None)
def test_a_request_at_any_replica_stops_all_of_them_behind_the_same_minibatch_and_soon(
    schedule: Schedule, seed: int, share: float, patience: int | None
) -> None:
    """Also before the first forward, and between cuts by time."""
    now = [0.0]
    interval = None if patience is None else float(patience)
    job = Job(schedule, seed, every=0, seconds=lambda: interval, clock=lambda: now[0])
    asked = job.random.choice(schedule.places)
    total = sum(1 for place in schedule.places for _ in rank_actions(schedule, [place]))
    entered: list[int] = []

    def ask(step: int) -> None:
        now[0] += job.random.random()
        if step == int(share * total):
            job.ranks[asked].steering.request(BY_SIGNAL)
            entered.append(job.entered)

    ask(0)
    job.run(at_step=ask)
    job.check()

    stops = {rank.steering.stop_after for rank in job.ranks.values()}
    assert len(stops) == 1
    (stop,) = stops
    end = schedule.minibatches - 1 if stop is None else stop
    assert {rank.next_update for rank in job.ranks.values()} == {end + 1}
    if entered:
        assert end - entered[0] <= longest_stop(schedule, timed_cuts=patience is not None)
