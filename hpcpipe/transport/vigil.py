"""The questions of one long wait: whom to ask next, and what has been heard so far.

It asks the ranks that the wait depends on, then those that they say they wait for, in rounds of bounded size, and
whoever may be gone or has not answered again before the round is due. It never blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hpcpipe.transport.chain import Finding, Sight, find, reached
from hpcpipe.transport.lines import Lines
from hpcpipe.transport.standing import Standing

ASK_EVERY_S = 2.0
ASK_AGAIN_S = 1.0
ASKED_AT_ONCE = 16
"""Ranks asked at a time: where a wait depends on more, the rounds take turns."""


@dataclass
class _Asked:
    """What is known of one rank; times are the clock's.

    standing: its last answer, which came at `heard`.
    questions: since its last answer, the first at `since`, the last at `last`.
    refused: when its host first said that there is no such process.
    """

    standing: Standing | None = None
    heard: float = 0.0
    questions: int = 0
    since: float = 0.0
    last: float = 0.0
    refused: float | None = None

    @property
    def is_pressing(self) -> bool:
        """Whether it should be asked before the others: it may be gone, or has not answered."""
        return self.refused is not None or self.questions > 0

    def sight(self, now: float) -> Sight:
        standing = self.standing
        if standing is not None:
            standing = replace(standing, seconds=standing.seconds + now - self.heard)
        return Sight(
            standing=standing,
            silent_s=now - self.since if self.questions else 0.0,
            questions=self.questions,
            gone_s=None if self.refused is None else now - self.refused,
        )


class Vigil:
    """One long wait of one rank: whom it has asked and what they have said. `name` names a rank in messages."""

    def __init__(self, lines: Lines, name: Callable[[int], str], clock: Callable[[], float]) -> None:
        self._lines = lines
        self._name = name
        self._clock = clock
        self._asked: dict[int, _Asked] = {}
        self._round_at = self._pressed_at = float("-inf")
        self._turn = 0
        self._first_serial = lines.serial()

    def look(self, peers: Sequence[int]) -> Finding:
        """Take what has been heard, ask who is to be asked, and say what is known of a wait for `peers`."""
        now = self._clock()
        for rank, asked in list(self._asked.items()):
            answers, alive = self._lines.heard_from(rank)
            fresh = [answer for answer in answers if answer.serial > self._first_serial]
            if fresh:
                self._asked[rank] = _Asked(standing=fresh[-1].standing, heard=now)
            elif not alive:
                asked.refused = now if asked.refused is None else asked.refused
        for rank in self._choose(peers, now):
            self._ask(rank, now)
        sights = {rank: asked.sight(now) for rank, asked in self._asked.items()}
        lines = self._lines
        return find(lines.rank, peers, sights, size=lines.size, hosts=lines.hosts, name=self._name)

    def _choose(self, peers: Sequence[int], now: float) -> list[int]:
        standings = {rank: asked.standing for rank, asked in self._asked.items()}
        ranks = reached(self._lines.rank, peers, standings, self._lines.size)
        fresh = [rank for rank in ranks if rank not in self._asked]
        if now - self._pressed_at < ASK_AGAIN_S:
            # Those at the end of a chain show one after another; crowds wait for the next round.
            return fresh[: max(0, ASKED_AT_ONCE - len(self._asked))]
        self._pressed_at = now
        due = [rank for rank in ranks if rank in self._asked and self._asked[rank].is_pressing]
        # Many that are silent leave room for those that have not been asked.
        pressing = sorted(due, key=lambda rank: self._asked[rank].last)[: ASKED_AT_ONCE // 2]
        if now - self._round_at < ASK_EVERY_S:
            return pressing
        self._round_at = now
        start = self._turn % max(1, len(ranks))
        self._turn += ASKED_AT_ONCE
        return list(dict.fromkeys([*pressing, *fresh, *ranks[start:], *ranks[:start]]))[:ASKED_AT_ONCE]

    def _ask(self, rank: int, now: float) -> None:
        asked = self._asked.setdefault(rank, _Asked())
        if not asked.questions:
            asked.since = now
        asked.questions += 1
        asked.last = now
        if not self._lines.ask(rank) and asked.refused is None:
            asked.refused = now
