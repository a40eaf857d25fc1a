from __future__ import annotations

import pytest

from hpcpipe.errors import TransportError
from hpcpipe.transport.wait import LONGEST_SLEEP_S, Condition, Waiter


class Clock:
    """Time that passes a little with each look and fully with each sleep, stretched to make waits long."""

    def __init__(self, stretch: float = 1.0) -> None:
        self.now = 0.0
        self.stretch = stretch
        self.sleeps: list[float] = []

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += self.stretch * seconds


class After:
    """A request that is done from a point in time on."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds
        self.tests = 0

    def Test(self) -> bool:
        self.tests += 1
        return self.clock.now >= self.seconds


def _waiter(clock: Clock, lines: list[str] | None = None, abort_after_s: float | None = None) -> Waiter:
    return Waiter(
        rank=2,
        abort_after_s=abort_after_s,
        describe=lambda: "stage 2",
        log=None if lines is None else lines.append,
        clock=clock,
        sleep=clock.sleep,
    )


def test_a_wait_ends_when_every_request_is_done() -> None:
    clock = Clock()
    requests = [After(clock, 0.003), After(clock, 0.001), After(clock, 0.0)]

    _waiter(clock).wait(requests, "them")

    assert clock.now >= 0.003
    assert requests[2].tests == 1


def test_what_is_done_already_costs_one_test_and_no_sleep() -> None:
    clock = Clock()

    _waiter(clock).wait([Condition(lambda: True)], "it")

    assert clock.sleeps == []


def test_a_wait_yields_first_and_then_sleeps_up_to_100_microseconds() -> None:
    clock = Clock()

    _waiter(clock).wait([After(clock, 0.01)], "it")

    assert clock.sleeps[0] < clock.sleeps[-1] == LONGEST_SLEEP_S == max(clock.sleeps)
    assert sum(clock.sleeps) < 0.01


def test_a_long_wait_says_who_waits_for_what_once_in_each_period() -> None:
    clock, lines = Clock(stretch=1e3), list[str]()

    _waiter(clock, lines).wait([After(clock, 185.0)], lambda: "activation of minibatch 71 from rank 1")

    assert lines == [
        f"rank 2 (stage 2) waits for activation of minibatch 71 from rank 1 for {seconds} s"
        for seconds in (60, 120, 180)
    ]


def test_a_wait_that_lasts_too_long_is_an_error_with_the_same_words() -> None:
    clock = Clock(stretch=1e3)

    with pytest.raises(
        TransportError, match=r"rank 2 \(stage 2\) waited for gradient of minibatch 3 from rank 3 for 600 s"
    ):
        _waiter(clock, [], abort_after_s=600.0).wait(
            [After(clock, 1e9)], lambda: "gradient of minibatch 3 from rank 3"
        )


def test_a_wait_without_a_limit_goes_on() -> None:
    clock, lines = Clock(stretch=1e4), list[str]()

    _waiter(clock, lines).wait([After(clock, 5000.0)], "it")

    assert len(lines) > 80


def test_a_patient_wait_warns_but_does_not_give_up() -> None:
    clock = Clock(stretch=1e4)
    lines: list[str] = []
    waiter = _waiter(clock, lines, abort_after_s=600.0)

    with waiter.patiently():
        waiter.wait([After(clock, 5000.0)], "the disk")

    assert clock.now >= 5000.0
    assert lines
    with pytest.raises(TransportError):
        waiter.wait([After(clock, 1e9)], "a message")


def test_hooks_run_while_waiting() -> None:
    clock, calls = Clock(), list[float]()
    waiter = _waiter(clock)
    waiter.idle.append(lambda: calls.append(clock.now))

    waiter.wait([After(clock, 0.002)], "it")

    assert len(calls) > 10


def test_the_time_of_waits_is_kept_by_kind() -> None:
    clock = Clock()
    waiter = _waiter(clock)

    waiter.wait([After(clock, 0.01)], "it", kind="activation")
    waiter.wait([After(clock, clock.now + 0.02)], "it", kind="gradient")
    waiter.wait([After(clock, clock.now + 0.02)], "it", kind="gradient")

    assert waiter.waited_s["activation"] == pytest.approx(0.01, abs=2e-4)
    assert waiter.waited_s["gradient"] == pytest.approx(0.04, abs=4e-4)


def test_an_error_of_mpi_names_who_waited_for_what() -> None:
    class Broken:
        def Test(self) -> bool:
            raise RuntimeError("MPI_ERR_TRUNCATE: message truncated")

    with pytest.raises(TransportError, match=r"rank 2 \(stage 2\) waits for it: MPI_ERR_TRUNCATE"):
        _waiter(Clock()).wait([Broken()], "it")


def test_without_a_log_the_line_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock(stretch=1e3)

    _waiter(clock).wait([After(clock, 61.0)], "it")

    assert capsys.readouterr().err == "hpcpipe: rank 2 (stage 2) waits for it for 60 s\n"
