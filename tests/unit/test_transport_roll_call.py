"""The roll call over loopback: every rank is a `RollCall` in this process; one that is frozen has no thread."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from hpcpipe.errors import FailedElsewhere
from hpcpipe.transport import lines as lines_module
from hpcpipe.transport.chain import Finding
from hpcpipe.transport.lines import Entry, Lines
from hpcpipe.transport.long_wait import Asking
from hpcpipe.transport.own_host import addresses, host_key
from hpcpipe.transport.roll_call import SPEAKS_FOR_S, RollCall, convene, unheard
from hpcpipe.transport.standing import TOKEN_BYTES, Answer, Notice, Question, Standing, decode, encode
from hpcpipe.transport.vigil import ASKED_AT_ONCE

IN_TIME_S = 20.0
WAITS = Standing(waits=True, what="activation of minibatch 7 from rank 0", seconds=58.0, peers=(0,))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Job:
    """Ranks on one host, by rank: their lines, and their parts in the roll call unless they are frozen."""

    def __init__(self, size: int, frozen: tuple[int, ...] = ()) -> None:
        self.clock = Clock()
        self.lines = [Lines(rank, "n0") for rank in range(size)]
        entries = [Entry.from_json(one.entry.as_json()) for one in self.lines]
        for one in self.lines:
            one.begin(entries)
        self.ranks = {
            rank: RollCall(one, clock=self.clock) for rank, one in enumerate(self.lines) if rank not in frozen
        }

    def close(self) -> None:
        for roll in self.ranks.values():
            roll.close()
        for one in self.lines:
            one.close()

    def until(self, vigil: Asking, peers: list[int], holds: Callable[[Finding], bool]) -> Finding:
        """Look until it holds, at one moment of the job's clock: answers need time of this machine only."""
        deadline = time.monotonic() + IN_TIME_S
        while time.monotonic() < deadline:
            finding = vigil.look(peers)
            if holds(finding):
                return finding
            time.sleep(0.002)
        raise AssertionError(f"in {IN_TIME_S} s only {vigil.look(peers)}")


@pytest.fixture
def make() -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def job(*arguments: Any, **options: Any) -> Job:
        made.append(Job(*arguments, **options))
        return made[-1]

    yield job
    for one in made:
        one.close()


def soon(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + IN_TIME_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_rank_answers_what_it_does(make: Callable[..., Job]) -> None:
    job = make(2)
    job.ranks[1].standing = lambda: Standing(what="F of minibatch 7", seconds=65.0)

    finding = job.until(job.ranks[0].vigil(), [1], lambda finding: finding.sure)

    assert finding.words == "rank 1 on host n0 works on F of minibatch 7 for 65 s"


def test_an_answer_grows_older(make: Callable[..., Job]) -> None:
    job = make(2)
    job.ranks[1].standing = lambda: Standing(what="F of minibatch 7", seconds=65.0)
    vigil = job.ranks[0].vigil()
    job.until(vigil, [1], lambda finding: finding.sure)

    job.clock.now += 1.0

    assert "for 66 s" in vigil.look([1]).words


def test_ranks_that_others_wait_for_are_asked_in_turn(make: Callable[..., Job]) -> None:
    job = make(3)
    job.ranks[0].name = job.ranks[2].name = lambda rank: f"rank {rank} (stage {rank})"
    job.ranks[1].standing = lambda: WAITS
    job.ranks[0].standing = lambda: Standing(what="U of minibatch 6", seconds=3.0)

    finding = job.until(job.ranks[2].vigil(), [1], lambda finding: finding.sure)

    assert finding.words == "rank 0 (stage 0) on host n0 works on U of minibatch 6 for 3 s"


def test_a_rank_whose_process_has_ended_is_gone_at_the_first_question(make: Callable[..., Job]) -> None:
    job = make(2)
    job.ranks[1].close()

    finding = job.until(job.ranks[0].vigil(), [1], lambda finding: finding.gone_s is not None)

    assert finding.words == "rank 1 on host n0 is gone: its process has ended"


def test_a_frozen_rank_is_silent_and_never_gone(make: Callable[..., Job]) -> None:
    job = make(2, frozen=(1,))
    vigil = job.ranks[0].vigil()

    silences = []
    for _ in range(6):
        silences.append(vigil.look([1]).silent_s)
        job.clock.now += 1.0

    assert silences == [0.0, 0.0, 2.0, 3.0, 4.0, 5.0]
    finding = vigil.look([1])
    assert finding.gone_s is None
    assert finding.words == "rank 1 on host n0 does not answer for 6 s: frozen, or its host is cut off"


def test_a_rank_that_answers_again_is_not_silent_any_more(make: Callable[..., Job]) -> None:
    job = make(2, frozen=(1,))
    vigil = job.ranks[0].vigil()
    for _ in range(4):
        vigil.look([1])
        job.clock.now += 1.0

    job.ranks[1] = RollCall(job.lines[1], clock=job.clock)

    job.until(vigil, [1], lambda finding: finding.words == "rank 1 on host n0 works for 0 s")


def test_a_refusal_from_a_host_that_never_answered_is_not_believed(make: Callable[..., Job]) -> None:
    """A firewall may refuse like a closed port."""
    job = make(2)
    elsewhere = replace(job.lines[1].entry, host="n1/boot", addresses=("127.0.0.1",))
    job.lines[0].begin([job.lines[0].entry, elsewhere])
    job.ranks[1].close()
    vigil = job.ranks[0].vigil()

    for _ in range(4):
        assert vigil.look([1]).gone_s is None
        time.sleep(0.01)
        job.clock.now += 1.0


def test_a_refusal_from_a_host_that_was_greeted_is_believed(make: Callable[..., Job]) -> None:
    job = make(2)
    elsewhere = replace(job.lines[1].entry, host="n1/boot", addresses=("127.0.0.1",))
    job.lines[0].begin([job.lines[0].entry, elsewhere])

    assert job.lines[0].greet(IN_TIME_S) == []

    job.ranks[1].close()
    job.until(job.ranks[0].vigil(), [1], lambda finding: finding.gone_s is not None)


def test_of_several_addresses_the_one_that_answers_is_taken(make: Callable[..., Job]) -> None:
    """As that of a container bridge, which every host has: there the questions of a host reach itself."""
    job = make(2)
    elsewhere = replace(job.lines[1].entry, host="n1/boot", addresses=("127.0.0.2", "127.0.0.1", "127.0.0.3"))
    stray = replace(job.lines[0].entry, port=job.lines[0].entry.port)
    job.lines[0].begin([stray, elsewhere])

    assert job.lines[0].greet(IN_TIME_S) == []
    assert job.until(job.ranks[0].vigil(), [1], lambda finding: finding.sure).words.startswith("rank 1 on host")


def test_a_host_that_does_not_answer_is_named(make: Callable[..., Job]) -> None:
    job = make(2, frozen=(1,))
    elsewhere = replace(job.lines[1].entry, host="n1/boot", name="n1", addresses=("127.0.0.1",))
    job.lines[0].begin([job.lines[0].entry, elsewhere])

    assert job.lines[0].greet(0.1) == ["n1"]


def test_questions_without_the_token_get_no_answer(make: Callable[..., Job]) -> None:
    job = make(1)
    token = bytes.fromhex(job.lines[0].entry.token)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.settimeout(IN_TIME_S)
        stranger.connect(("127.0.0.1", job.lines[0].entry.port))
        for noise in (b"", b"who are you?", encode(bytes(TOKEN_BYTES), Question(rank=0, serial=1)), b"x" * 5000):
            stranger.send(noise)
        stranger.send(encode(token, Question(rank=0, serial=9)))

        answer = decode(token, stranger.recv(5000), size=1)

    assert isinstance(answer, Answer)
    assert answer.serial == 9


def test_a_standing_that_cannot_be_told_does_not_make_a_rank_look_lost(make: Callable[..., Job]) -> None:
    job = make(2)

    def broken() -> Standing:
        raise ValueError("no name")

    job.ranks[1].standing = broken

    job.until(job.ranks[0].vigil(), [1], lambda finding: finding.sure)


def test_whoever_ends_the_job_is_believed_at_once(make: Callable[..., Job]) -> None:
    job = make(3)

    job.ranks[1].farewell(2)

    def told() -> bool:
        try:
            job.ranks[0].check_endings()
        except FailedElsewhere as error:
            return error.exit_code == 2
        return False

    soon(told)
    job.ranks[1].check_endings()


def test_of_two_ranks_that_want_to_speak_the_lower_one_does(make: Callable[..., Job]) -> None:
    job = make(3)

    job.ranks[1].will_speak()

    soon(job.ranks[2].someone_speaks)
    assert not job.ranks[1].someone_speaks()
    assert not job.ranks[0].someone_speaks()
    job.clock.now += SPEAKS_FOR_S
    assert not job.ranks[2].someone_speaks()


def test_a_crowd_is_asked_a_few_at_a_time(make: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    size = 3 * ASKED_AT_ONCE
    job = make(size, frozen=tuple(range(1, size)))
    asked: list[int] = []
    monkeypatch.setattr(job.lines[0], "ask", lambda rank: asked.append(rank) is None)
    vigil = job.ranks[0].vigil()

    for _ in range(40):
        vigil.look(list(range(1, size)))
        job.clock.now += 0.25

    # Ten seconds: a question that is not answered is repeated once a second.
    assert len(asked) <= 11 * ASKED_AT_ONCE
    assert set(asked) == set(range(1, size))


def test_few_sockets_stay_open_however_many_are_asked(
    make: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines_module, "OPEN_SOCKETS", 2)
    job = make(5)

    finding = job.until(job.ranks[0].vigil(), [1, 2, 3, 4], lambda finding: bool(finding.words))

    assert "works" in finding.words
    assert len(job.lines[0]._asking) <= 2


def test_a_forked_helper_does_not_keep_the_port_of_a_rank_that_is_gone(make: Callable[..., Job]) -> None:
    job = make(2)
    begun, begins = os.pipe()
    helper = os.fork()
    if helper == 0:
        os.write(begins, b"x")
        time.sleep(IN_TIME_S)
        os._exit(0)
    try:
        os.read(begun, 1)
        job.ranks[1].close()
        job.until(job.ranks[0].vigil(), [1], lambda finding: finding.gone_s is not None)
    finally:
        os.kill(helper, signal.SIGKILL)
        os.waitpid(helper, 0)
        os.close(begun)
        os.close(begins)


def test_a_thread_of_the_roll_call_takes_no_signals(make: Callable[..., Job]) -> None:
    make(1)
    (thread,) = [each for each in threading.enumerate() if each.name == "roll call" and each.is_alive()][-1:]

    def blocked() -> int:
        with open(f"/proc/self/task/{thread.native_id}/status") as status:
            (mask,) = [line.split()[1] for line in status if line.startswith("SigBlk")]
        return int(mask, 16)

    soon(lambda: bool(blocked() >> (signal.SIGUSR1 - 1) & 1 and blocked() >> (signal.SIGTERM - 1) & 1))


class Room:
    """The gatherings of ranks before they know each other: each runs in a thread of its own."""

    def __init__(self, hosts: list[str]) -> None:
        self.hosts = hosts
        self.size = len(hosts)
        self._values: list[Any] = [None] * self.size
        self._meeting = threading.Barrier(self.size)

    def member(self, rank: int) -> Member:
        return Member(self, rank)

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._meeting.wait(IN_TIME_S)
        found = list(self._values)
        self._meeting.wait(IN_TIME_S)
        return found


class Member:
    def __init__(self, room: Room, rank: int) -> None:
        self.rank, self.size, self.hosts, self.host = rank, room.size, room.hosts, room.hosts[rank]
        self._room = room

    def all_gather_json(self, value: Any, *, what: str) -> list[Any]:
        return self._room.gather(self.rank, value)

    def gather_json(self, value: Any, *, what: str) -> list[Any] | None:
        found = self._room.gather(self.rank, value)
        return found if self.rank == 0 else None

    def barrier(self, what: str) -> None:
        self._room.gather(self.rank, None)


def convened(hosts: list[str]) -> list[tuple[RollCall | None, str | None]]:
    room = Room(hosts)
    found: list[Any] = [None] * room.size

    def meet(rank: int) -> None:
        found[rank] = convene(room.member(rank))

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(room.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(IN_TIME_S)
    return found


def close(found: list[tuple[RollCall | None, str | None]]) -> None:
    for roll, _ in found:
        if roll is not None:
            roll.close()


def test_ranks_of_one_host_convene_without_a_word() -> None:
    found = convened(["n0", "n0", "n0"])

    assert all(roll is not None and remark is None for roll, remark in found)
    close(found)


@pytest.mark.skipif(not addresses(), reason="this machine has no address but loopback")
def test_ranks_of_several_hosts_find_the_way_to_each_other() -> None:
    found = convened(["n0", "n0", "n1", "n1"])

    assert all(roll is not None and remark is None for roll, remark in found)
    roll = found[0][0]
    assert roll is not None
    job_looks = Job.until
    assert job_looks(Job(0), roll.vigil(), [3], lambda finding: finding.sure).words.startswith("rank 3 on host n1")
    close(found)


def test_a_job_of_one_rank_has_nobody_to_call() -> None:
    assert convened(["n0"]) == [(None, None)]


def test_without_a_socket_on_one_rank_all_do_without_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(rank: int, host: str) -> Lines:
        if rank == 1:
            raise OSError("Too many open files")
        return Lines(rank, host)

    monkeypatch.setattr("hpcpipe.transport.roll_call.Lines", refuse)

    (first, remark), (second, other) = convened(["n0", "n1"])

    assert (first, second) == (None, None)
    assert remark == other
    assert remark is not None
    assert remark.startswith("rank 1 on host n1 has no UDP socket (Too many open files):")


def test_hosts_that_do_not_hear_each_other_are_one_remark() -> None:
    assert unheard([[], []], ["n0", "n1"]) is None
    remark = unheard([["n1", "n2"], ["n0"], []], ["n0", "n1", "n2"])
    assert remark is not None
    assert remark.startswith("hosts n0 and n1 do not hear each other by UDP, nor does 1 other pair: ")


def test_two_processes_are_on_one_host_only_with_the_same_name_and_network() -> None:
    assert host_key("n0") == host_key("n0") != host_key("n1")
    assert host_key("n0").count("/") == 2


def test_no_address_is_loopback() -> None:
    assert all(not address.startswith("127.") for address in addresses())


def test_a_notice_of_its_own_rank_does_not_end_it(make: Callable[..., Job]) -> None:
    job = make(2)
    entry = job.lines[0].entry
    token = bytes.fromhex(entry.token)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.connect(("127.0.0.1", entry.port))
        stranger.settimeout(IN_TIME_S)
        stranger.send(encode(token, Notice(rank=0, code=1)))
        stranger.send(encode(token, Question(rank=1, serial=1)))
        stranger.recv(5000)

    job.ranks[0].check_endings()
