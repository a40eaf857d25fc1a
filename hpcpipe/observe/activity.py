"""What a rank does when: seconds per kind of action, and on request a timeline for a trace viewer."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from hpcpipe.schedule.actions import Action
from hpcpipe.schedule.timeline import BUSY, trace_event


class Activity:
    """Times of one rank's actions. Times come in seconds of one clock, `origin` is where the timeline starts.

    current: the action that the rank is at, and since when; whoever executes them sets it.
    """

    def __init__(self, *, rank: int, origin: float, trace: bool) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.events: list[dict[str, Any]] = []
        self.current: tuple[Action, float] | None = None
        self._rank = rank
        self._origin = origin
        self._trace = trace

    def note(self, action: Action, began: float, ended: float) -> None:
        """`action` ran from `began` to `ended`."""
        self.seconds[action.op.value] += ended - began
        if self._trace:
            origin = self._origin
            self.events.append(trace_event(action, self._rank, began - origin, ended - origin))

    def task(self) -> tuple[str, float] | None:
        """What the rank is at, in words, and since when; other threads may ask."""
        current = self.current
        return None if current is None else (current[0].words, current[1])

    def busy_seconds(self) -> float:
        """Seconds spent computing."""
        return sum(self.seconds[op.value] for op in BUSY)
