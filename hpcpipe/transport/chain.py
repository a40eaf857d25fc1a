"""Whom a wait is really for: follows who waits for whom to the ranks at the end, which wait for nobody.

A rank that waits for a neighbour that waits for a neighbour is a bystander; the one at the end of the chain is
gone, does not answer, or works. Pure functions of what has been heard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hpcpipe.transport.standing import Standing, listed

SILENT_AFTER_S = 1.5
SILENT_AFTER_QUESTIONS = 2
"""A rank does not answer when it has not for so long and so often: one packet may be lost."""
LONGEST_CHAIN = 4
"""Ranks of a chain that are named one by one."""


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What one rank knows of another.

    standing: its last answer, None before the first.
    silent_s: seconds since the first question that it has not answered; 0 when it has answered all.
    questions: how many it has not answered.
    gone_s: seconds since its host first said that the process has ended; None when it has not said so.
    """

    standing: Standing | None = None
    silent_s: float = 0.0
    questions: int = 0
    gone_s: float | None = None

    @property
    def silent(self) -> bool:
        """Whether it does not answer."""
        return self.silent_s >= SILENT_AFTER_S and self.questions >= SILENT_AFTER_QUESTIONS


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What is at the end of a wait.

    words: one clause for people, as "rank 1 on host n1 does not answer for 12 s: ..."; empty when all is unknown.
    gone_s: how long a rank has been known to be gone, None where none is.
    silent_s: how long the longest silent rank has not answered, 0 where all answer.
    sure: whether every rank that matters has been heard, or asked for long enough.
    """

    words: str = ""
    gone_s: float | None = None
    silent_s: float = 0.0
    sure: bool = False


def reached(rank: int, peers: Sequence[int], standings: Mapping[int, Standing | None], size: int) -> list[int]:
    """All ranks that a wait of `rank` for `peers` depends on as far as is known, the nearest first.

    standings: the last answer of those that have given one.
    """
    found: dict[int, None] = {}
    front: Iterable[int] = peers
    while front:
        fresh = [other for other in dict.fromkeys(front) if other != rank and other not in found]
        found |= dict.fromkeys(fresh)
        front = [peer for other in fresh for peer in waits_for(other, standings.get(other), size)]
    return list(found)


def waits_for(rank: int, standing: Standing | None, size: int) -> Sequence[int]:
    """The ranks that `rank` waits for, none when it works or has not been heard."""
    if standing is None or not standing.waits:
        return ()
    if standing.peers is not None:
        return standing.peers
    return [(rank + step) % size for step in range(1, size)]


def find(
    rank: int,
    peers: Sequence[int],
    sights: Mapping[int, Sight],
    *,
    size: int,
    hosts: Sequence[str],
    name: Callable[[int], str],
) -> Finding:
    """Follow a wait of `rank` for `peers` to its end.

    sights: what is known of those that have been asked.
    hosts: host name of every rank.
    name: names a rank, as "rank 1 (stage 1)".
    """
    standings = {other: sight.standing for other, sight in sights.items()}
    # An old answer of a rank that is silent by now leads nowhere.
    for other, sight in sights.items():
        if sight.silent or sight.gone_s is not None:
            standings[other] = None
    ranks = reached(rank, peers, standings, size)
    known = {other: sights[other] for other in ranks if other in sights}
    gone = [other for other, sight in known.items() if sight.gone_s is not None]
    silent = [other for other, sight in known.items() if sight.silent and other not in gone]
    if gone:
        words = f"{_where(gone, hosts, name)} {'is' if len(gone) == 1 else 'are'} gone: "
        words += "its process has ended" if len(gone) == 1 else "their processes have ended"
    elif silent:
        one = len(silent) == 1
        longest = max(known[other].silent_s for other in silent)
        words = f"{_where(silent, hosts, name)} {'does' if one else 'do'} not answer for {longest:.0f} s: "
        words += f"frozen, or {'its' if one else 'their'} host is cut off"
    else:
        words = _ends(ranks, known, size=size, hosts=hosts, name=name)
    culprit = next(iter([*gone, *silent]), None)
    if culprit is not None:
        words = _through(rank, peers, culprit, standings, size) + words
    return Finding(
        words=words,
        gone_s=max((sight.gone_s for sight in known.values() if sight.gone_s is not None), default=None),
        silent_s=max((known[other].silent_s for other in silent), default=0.0),
        sure=bool(ranks) and all(_is_clear(known.get(other)) for other in ranks),
    )


def _is_clear(sight: Sight | None) -> bool:
    if sight is None:
        return False
    return sight.silent or sight.gone_s is not None or (sight.standing is not None and sight.questions == 0)


def _ends(
    ranks: Sequence[int],
    known: Mapping[int, Sight],
    *,
    size: int,
    hosts: Sequence[str],
    name: Callable[[int], str],
) -> str:
    """Who keeps the others waiting when everybody answers: the one that has longest been at the same thing."""
    heard = {other: sight.standing for other, sight in known.items() if sight.standing is not None}
    ends = [other for other, standing in heard.items() if not waits_for(other, standing, size)]
    if ends:
        last = max(ends, key=lambda other: heard[other].seconds)
        return f"{_where([last], hosts, name)} {heard[last].words()}"
    if len(heard) < len(ranks) or not heard:
        return ""
    nearest = list(heard)[:LONGEST_CHAIN]
    circle = ", ".join(f"{name(other)} {heard[other].words()}" for other in nearest)
    return f"they all wait: {circle}"


def _through(
    rank: int, peers: Sequence[int], culprit: int, standings: Mapping[int, Standing | None], size: int
) -> str:
    """The chain from the first of `peers` up to `culprit` in words, empty when it is one of them."""
    before: dict[int, int | None] = dict.fromkeys(peers)
    front = list(before)
    while culprit not in before and front:
        following = []
        for other in front:
            for peer in waits_for(other, standings.get(other), size):
                if peer != rank and peer not in before:
                    before[peer] = other
                    following.append(peer)
        front = following
    links: list[int] = []
    at: int | None = culprit
    while at is not None:
        links.append(at)
        at = before.get(at)
    links.reverse()
    if len(links) == 1:
        return ""
    if len(links) > LONGEST_CHAIN:
        return f"through ranks {listed(links[:-1])}: "
    return ", ".join(f"rank {one} waits for rank {other}" for one, other in pairwise(links)) + ", "


def _where(ranks: Sequence[int], hosts: Sequence[str], name: Callable[[int], str]) -> str:
    places = list(dict.fromkeys(hosts[other] for other in ranks))
    who = name(ranks[0]) if len(ranks) == 1 else f"ranks {listed(ranks)}"
    return f"{who} on host{'s' if len(places) > 1 else ''} {', '.join(places)}"
