"""What a rank does when: seconds per kind of action, and on request a timeline for a trace viewer."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from hpcpipe.schedule.actions import Action
from hpcpipe.schedule.timeline import BUSY, trace_event


class Activity:
    """Times of one rank's actions. Times come in seconds of one clock, `origin` is where the timeline starts."""

    def __init__(self, *, rank: int, origin: float, trace: bool) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.events: list[dict[str, Any]] = []
        self._rank = rank
        self._origin = origin
        self._trace = trace

    def note(self, action: Action, began: float, ended: float) -> None:
        """`action` ran from `began` to `ended`."""
        self.seconds[action.op.value] += ended - began
        if self._trace:
            origin = self._origin
            self.events.append(trace_event(action, self._rank, began - origin, ended - origin))

    def busy_seconds(self) -> float:
        """Seconds spent computing."""
        return sum(self.seconds[op.value] for op in BUSY)
