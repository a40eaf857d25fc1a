"""Actions on a timeline, as events of a Chrome trace: the same whether a run was real or simulated.

It owns the marks, so that both kinds of traces can be laid side by side. It measures and writes nothing.
"""

from __future__ import annotations

from typing import Any

from hpcpipe.schedule.actions import COMPUTES, Action, Op

BUSY = COMPUTES | {Op.UPDATE, Op.PREDICT}
"""What a rank computes; in everything else it waits."""
MICROSECONDS = 1e6


def mark(action: Action) -> str:
    """The action in a word: F3, or F3.1 for microbatch 1."""
    micro = f".{action.microbatch}" if action.microbatch else ""
    return f"{action.op.value}{action.minibatch}{micro}"


def trace_event(action: Action, rank: int, began: float, ended: float) -> dict[str, Any]:
    """The event of an action that took `rank` from `began` to `ended`, in seconds since the timeline's start."""
    return {
        "name": mark(action),
        "cat": "busy" if action.op in BUSY else "message",
        "ph": "X",
        "ts": began * MICROSECONDS,
        "dur": (ended - began) * MICROSECONDS,
        "pid": rank,
        "tid": action.stage,
        "args": {"version": action.version, "distance": action.distance},
    }
