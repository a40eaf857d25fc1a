"""Who is at the end of a wait: the rank that is named is never one that waits itself."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from hpcpipe.transport.chain import Finding, Sight, find, reached
from hpcpipe.transport.standing import Standing

GONE = Sight(gone_s=1.0)
SILENT = Sight(silent_s=12.0, questions=6)


def waits(*peers: int, seconds: float = 10.0) -> Sight:
    what = f"activation of minibatch 7 from rank {peers[0]}" if peers else "a disk"
    return Sight(standing=Standing(waits=True, what=what, seconds=seconds, peers=peers))


def waits_for_all() -> Sight:
    return Sight(standing=Standing(waits=True, what="the losses", seconds=10.0, peers=None))


def works(seconds: float) -> Sight:
    return Sight(standing=Standing(what="F of minibatch 7", seconds=seconds))


def look(peers: list[int], sights: Mapping[int, Sight], rank: int = 3, size: int = 4) -> Finding:
    hosts = [f"n{other // 2}" for other in range(size)]
    return find(rank, peers, sights, size=size, hosts=hosts, name=lambda other: f"rank {other} (stage {other})")


@pytest.mark.parametrize(
    ("sight", "words"),
    [
        (GONE, "is gone: its process has ended"),
        (SILENT, "does not answer for 12 s: frozen, or its host is cut off"),
        (works(65.0), "works on F of minibatch 7 for 65 s"),
        (waits(), "waits for a disk for 10 s"),
    ],
)
def test_a_wait_for_one_rank_says_what_that_one_does(sight: Sight, words: str) -> None:
    assert look([2], {2: sight}).words == f"rank 2 (stage 2) on host n1 {words}"


def test_a_chain_is_followed_to_its_end() -> None:
    finding = look([2], {2: waits(1), 1: waits(0), 0: SILENT})

    assert finding.words == (
        "rank 2 waits for rank 1, rank 1 waits for rank 0, rank 0 (stage 0) on host n0 does not answer for 12 s: "
        "frozen, or its host is cut off"
    )
    assert finding.silent_s == 12.0


def test_a_long_chain_is_told_in_short() -> None:
    sights: dict[int, Sight] = {rank: waits(rank - 1) for rank in range(1, 9)}

    finding = look([8], {**sights, 0: GONE}, rank=9, size=10)

    assert finding.words.startswith("through ranks 8, 7, 6, 5, 4, 3, 2 and 1: rank 0 (stage 0) on host n0 is gone")


def test_a_worker_at_the_end_of_a_chain_is_named_and_nobody_before_it() -> None:
    assert look([2], {2: waits(1), 1: works(65.0)}).words == (
        "rank 1 (stage 1) on host n0 works on F of minibatch 7 for 65 s"
    )


def test_of_a_collective_the_one_that_does_not_come_is_named() -> None:
    sights = {0: waits_for_all(), 1: works(5.0), 2: waits_for_all()}

    assert look([0, 1, 2], sights).words == "rank 1 (stage 1) on host n0 works on F of minibatch 7 for 5 s"


def test_of_several_workers_the_one_that_is_longest_at_it_is_named() -> None:
    assert "rank 0" in look([0, 1, 2], {0: works(9.0), 1: works(5.0), 2: works(0.1)}).words


def test_all_ranks_of_a_host_that_is_cut_off_are_named() -> None:
    finding = look([0, 1, 2], {0: SILENT, 1: SILENT, 2: waits(1)})

    assert finding.words == ("ranks 0 and 1 on host n0 do not answer for 12 s: frozen, or their host is cut off")


def test_a_rank_that_is_gone_matters_more_than_one_that_is_silent() -> None:
    finding = look([1, 2], {1: SILENT, 2: GONE})

    assert "rank 2 (stage 2) on host n1 is gone" in finding.words
    assert finding.gone_s == 1.0


def test_the_old_answer_of_a_silent_rank_leads_nowhere() -> None:
    old = Standing(waits=True, what="activation of minibatch 6 from rank 0", seconds=1.0, peers=(0,))
    sights = {1: Sight(standing=old, silent_s=9.0, questions=4), 0: works(100.0)}

    assert "rank 1 (stage 1) on host n0 does not answer" in look([1], sights).words


@pytest.mark.parametrize("sight", [Sight(silent_s=1.0, questions=3), Sight(silent_s=9.0, questions=1)])
def test_one_late_answer_or_one_lost_packet_is_no_silence(sight: Sight) -> None:
    finding = look([2], {2: sight})

    assert (finding.words, finding.silent_s, finding.sure) == ("", 0.0, False)


def test_ranks_that_wait_for_each_other_are_all_told() -> None:
    finding = look([2], {2: waits(3)})

    assert finding.words == (
        "they all wait: rank 2 (stage 2) waits for activation of minibatch 7 from rank 3 for 10 s"
    )


def test_nothing_is_said_of_ranks_that_nobody_has_heard() -> None:
    assert look([2], {}) == Finding()
    assert look([2], {2: waits(1)}).words == ""


def test_a_finding_is_sure_when_all_that_matter_have_been_heard() -> None:
    assert not look([2], {2: waits(1)}).sure
    assert look([2], {2: waits(1), 1: works(1.0)}).sure
    assert look([2], {2: waits(1), 1: SILENT}).sure


def test_what_a_wait_depends_on_comes_nearest_first() -> None:
    standings = {2: waits(1).standing, 1: waits_for_all().standing}

    assert reached(3, [2], standings, 5) == [2, 1, 4, 0]
