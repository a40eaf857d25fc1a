"""What a rank does about a wait that lasts, with other ranks that say what a test lets them say."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from hpcpipe.errors import FailedElsewhere, TransportError
from hpcpipe.transport.chain import Finding
from hpcpipe.transport.long_wait import ASK_AFTER_S, BE_SURE_S, GONE_FOR_S, LOOK_EVERY_S
from hpcpipe.transport.standing import Standing
from hpcpipe.transport.wait import SUSPENDED_S, Waiter

GONE = "rank 1 (stage 1) on host n1 is gone: its process has ended"
SILENT = "rank 1 (stage 1) on host n1 does not answer for 9 s: frozen, or its host is cut off"
WORKS = "rank 1 (stage 1) on host n1 works on F of minibatch 71 for 65 s"


class Others:
    """The other ranks: `says` is what a look at a time of the clock finds. `asked` are those times."""

    def __init__(self, says: Callable[[float], Finding] = lambda now: Finding(sure=True)) -> None:
        self.now = 0.0
        self.says = says
        self.asked: list[float] = []
        self.peers: list[tuple[int, ...]] = []
        self.vigils = 0
        self.spoken = 0
        self.ends_at = float("inf")
        self.lower_speaks_until = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        # Sleeps of a wait are stretched, those between two questions are not.
        self.now += min(100 * seconds, 0.05) if seconds < LOOK_EVERY_S else seconds

    def vigil(self) -> Others:
        self.vigils += 1
        return self

    def look(self, peers: Sequence[int]) -> Finding:
        self.asked.append(self.now)
        self.peers.append(tuple(peers))
        return self.says(self.now)

    def check_endings(self) -> None:
        if self.now >= self.ends_at:
            raise FailedElsewhere(3, 75)

    def will_speak(self) -> None:
        self.spoken += 1

    def someone_speaks(self) -> bool:
        return self.now < self.lower_speaks_until


class After:
    """A request that is done from a point in time on."""

    def __init__(self, others: Others, seconds: float) -> None:
        self.others, self.seconds = others, seconds

    def Test(self) -> bool:
        return self.others.now >= self.seconds


def waiter(
    others: Others, lines: list[str] | None = None, *, warn_s: float = 60.0, abort_s: float | None = 600.0
) -> Waiter:
    made = Waiter(
        rank=2,
        warn_after_s=warn_s,
        abort_after_s=abort_s,
        describe=lambda: "stage 2",
        log=([] if lines is None else lines).append,
        clock=others,
        sleep=others.sleep,
    )
    made.watch = others
    return made


def wait(made: Waiter, others: Others, seconds: float = 1e9, peers: Sequence[int] = (1,)) -> None:
    made.wait([After(others, seconds)], "activation of minibatch 71 from rank 1", peers=peers)


def gone(now: float) -> Finding:
    return Finding(words=GONE, gone_s=now - ASK_AFTER_S, sure=True)


def test_nobody_is_asked_in_a_wait_of_less_than_two_seconds() -> None:
    others = Others()

    wait(waiter(others), others, seconds=1.9)

    assert others.asked == []


def test_a_longer_wait_asks_its_peers_again_and_again() -> None:
    others = Others()

    wait(waiter(others), others, seconds=10.0, peers=(1, 3))

    assert others.asked[0] == pytest.approx(ASK_AFTER_S, abs=0.1)
    assert others.asked[-1] > 9.0
    assert set(others.peers) == {(1, 3)}


def test_nobody_is_asked_about_a_wait_for_a_disk() -> None:
    others = Others()

    wait(waiter(others), others, seconds=10.0, peers=())

    assert others.asked == []


def test_a_rank_that_is_gone_ends_the_wait_within_seconds() -> None:
    others = Others(gone)

    with pytest.raises(TransportError) as caught:
        wait(waiter(others), others)

    assert (
        str(caught.value) == f"rank 2 (stage 2) waited for activation of minibatch 71 from rank 1 for 3 s; {GONE}"
    )
    assert others.now < 5.0
    assert others.spoken == 1


def test_a_rank_that_has_ended_properly_with_its_last_message_on_its_way_is_not_lost() -> None:
    others = Others(gone)

    wait(waiter(others), others, seconds=ASK_AFTER_S + GONE_FOR_S)


def test_a_warning_and_the_error_say_what_is_known_of_the_others() -> None:
    others, lines = Others(lambda now: Finding(words=WORKS, sure=True)), list[str]()

    with pytest.raises(TransportError) as caught:
        wait(waiter(others, lines, abort_s=130.0), others)

    assert lines == [
        f"rank 2 (stage 2) waits for activation of minibatch 71 from rank 1 for {seconds} s; {WORKS}"
        for seconds in (60, 120)
    ]
    assert str(caught.value).endswith(f"from rank 1 for 130 s; {WORKS}")


def test_a_rank_that_works_is_waited_for_up_to_the_limit() -> None:
    others = Others(lambda now: Finding(words=WORKS, sure=True))

    wait(waiter(others, abort_s=600.0), others, seconds=599.0)


def test_the_end_of_a_wait_is_put_off_until_the_ranks_that_matter_are_heard() -> None:
    others = Others(lambda now: Finding(words=SILENT, silent_s=9.0, sure=now > 9.0))

    with pytest.raises(TransportError, match="does not answer"):
        wait(waiter(others, abort_s=8.0), others)

    assert 9.0 < others.now < 10.0


def test_but_not_for_long() -> None:
    others = Others(lambda now: Finding())

    with pytest.raises(TransportError, match=r"from rank 1 for 10 s$"):
        wait(waiter(others, abort_s=8.0), others)

    assert others.now < 8.0 + BE_SURE_S + 1.0


def test_a_rank_asks_in_time_where_the_limit_is_short() -> None:
    others = Others()

    with pytest.raises(TransportError):
        wait(waiter(others, warn_s=0.5, abort_s=1.2), others)

    assert others.asked[0] < 0.8


def test_another_rank_that_ends_the_job_is_the_reason() -> None:
    others = Others(gone)
    others.ends_at = 2.0

    with pytest.raises(FailedElsewhere) as caught:
        wait(waiter(others), others)

    assert caught.value.exit_code == 75


def test_a_rank_leaves_the_word_to_a_lower_one_for_a_second() -> None:
    others = Others(gone)
    others.lower_speaks_until = 4.2

    with pytest.raises(TransportError):
        wait(waiter(others), others)

    assert 4.2 <= others.now < 5.0


def test_a_patient_wait_goes_on_while_others_answer() -> None:
    others = Others(lambda now: Finding(words=WORKS, sure=True))
    made = waiter(others, abort_s=8.0)

    with made.patiently():
        wait(made, others, seconds=100.0)


def test_a_patient_wait_ends_when_a_rank_has_been_silent_for_the_limit() -> None:
    others = Others(lambda now: Finding(words=SILENT, silent_s=max(0.0, now - 50.0), sure=True))
    made = waiter(others, abort_s=8.0)

    with made.patiently(), pytest.raises(TransportError, match="does not answer"):
        wait(made, others)

    assert 58.0 <= others.now < 60.0


def test_time_in_which_this_process_was_stopped_does_not_count() -> None:
    others = Others()

    class Stopped(After):
        """Stopped at once for an hour after three seconds, as a job that its scheduler suspends."""

        def Test(self) -> bool:
            if 3.0 < self.others.now < 100.0:
                self.others.now += 3600.0
            return super().Test()

    made = waiter(others, abort_s=8.0)

    with pytest.raises(TransportError, match="for 8 s"):
        made.wait([Stopped(others, 1e9)], "it", peers=(1,))

    assert others.now == pytest.approx(3608.0, abs=1.0)
    # What was not heard in that hour says nothing: the questions begin anew.
    assert others.vigils == 2
    assert SUSPENDED_S < 3600.0


def test_an_error_of_mpi_is_told_with_what_is_known_of_the_others() -> None:
    others = Others(lambda now: Finding(words=GONE, gone_s=0.1, sure=True))

    class Broken:
        def Test(self) -> bool:
            raise RuntimeError("MPI_ERR_OTHER: connection reset")

    with pytest.raises(TransportError) as caught:
        waiter(others).wait([Broken()], "it", peers=(1,))

    assert str(caught.value) == f"rank 2 (stage 2) waits for it: MPI_ERR_OTHER: connection reset; {GONE}"


def test_an_error_of_mpi_because_another_rank_ends_the_job_is_not_told() -> None:
    others = Others()
    others.ends_at = 0.5

    class Broken:
        def Test(self) -> bool:
            raise RuntimeError("MPI_ERR_OTHER: connection reset")

    with pytest.raises(FailedElsewhere):
        waiter(others).wait([Broken()], "it", peers=(1,))


def test_a_rank_says_what_it_waits_for_and_from_whom() -> None:
    others, seen = Others(), list[Standing]()
    made = waiter(others)
    made.idle.append(lambda: seen.append(made.standing()))

    wait(made, others, seconds=5.0)

    assert not seen[0].waits
    assert (seen[-1].waits, seen[-1].what, seen[-1].peers) == (
        True,
        "activation of minibatch 71 from rank 1",
        (1,),
    )
    assert seen[-1].seconds == pytest.approx(5.0, abs=0.1)
    assert not made.standing().waits


def test_a_rank_says_what_it_is_at_between_waits() -> None:
    others = Others()
    made = waiter(others)

    with made.busy("building the stages"):
        others.now += 12.3
        inside = made.standing()

    assert inside.words() == "works on building the stages for 12 s"
    assert made.standing() == Standing()


def test_peers_that_change_are_asked_for_anew() -> None:
    others = Others()
    made = waiter(others)

    made.wait([After(others, 6.0)], lambda: "them", peers=lambda: [1] if others.now < 4.0 else [3])

    assert others.peers[0] == (1,)
    assert others.peers[-1] == (3,)
