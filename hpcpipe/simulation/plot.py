"""A simulated window as a picture (PNG): one row a rank, one colour a kind of action.

matplotlib is asked for only here, and only when a picture is wanted.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from hpcpipe.errors import PlanError
from hpcpipe.schedule import Action, Op
from hpcpipe.schedule.actions import COMPUTES
from hpcpipe.simulation.result import Simulated

COLOURS = {
    Op.FORWARD: "#4c78a8",
    Op.BACKWARD: "#f2a03d",
    Op.UPDATE: "#54a24b",
    Op.PREDICT: "#b5cf6b",
    Op.EVALUATE: "#b279a2",
    Op.REDUCE: "#d65f5f",
}
NAMES = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.UPDATE: "update",
    Op.PREDICT: "predict",
    Op.EVALUATE: "evaluate",
    Op.REDUCE: "waits for the all-reduce",
}
_LABELLED = 0.012
"""Share of the picture's width from which a pass carries its minibatch's number."""
_INCHES = (14.0, 2.0)


def save_timeline(simulated: Simulated, path: str | Path, *, window: tuple[int, int]) -> None:
    """Draw `simulated` into `path`, from the first action of minibatch `window[0]` to the last before `window[1]`.

    What was recorded of minibatches around them is drawn, too.

    Raises PlanError: matplotlib is not installed, the window is empty, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise PlanError("a timeline needs matplotlib: pip install hpcpipe[plots]") from None
    shown = [event for event in simulated.events if event.action.op in COLOURS]
    inside = [event for event in shown if window[0] <= event.action.minibatch < window[1]]
    if not inside:
        raise PlanError("no action lies in the window of the timeline: ask for another --window")
    begin, end = min(event.start for event in inside), max(event.end for event in inside)
    spans: dict[tuple[Op, int], list[tuple[float, float]]] = defaultdict(list)
    for event in shown:
        spans[event.action.op, event.rank].append((event.start, event.end - event.start))
    ranks = sorted({event.rank for event in shown})
    figure = Figure(figsize=(_INCHES[0], _INCHES[1] + min(40.0, 0.28 * len(ranks))), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    for (op, rank), bars in spans.items():
        axes.broken_barh(bars, (rank - 0.4, 0.8), facecolors=COLOURS[op], linewidth=0)
    passes = [
        event for event in shown if event.action.op in COMPUTES and begin <= event.start and event.end <= end
    ]
    for event in passes:
        if event.end - event.start >= _LABELLED * (end - begin):
            middle = (event.start + event.end) / 2
            axes.text(middle, event.rank, _number(event.action), ha="center", va="center", fontsize=6)
    axes.set_ylim(ranks[-1] + 0.6, ranks[0] - 0.6)
    axes.set_xlim(begin, end)
    axes.set_xlabel("seconds")
    if len(ranks) <= 64:
        axes.set_yticks(ranks, [f"rank {rank}: {_stages(simulated, rank)}" for rank in ranks], fontsize=7)
    else:
        axes.set_ylabel("rank")
    for op in dict.fromkeys(event.action.op for event in shown):
        axes.barh(0, 0, color=COLOURS[op], label=NAMES[op])
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=len(COLOURS), frameon=False, fontsize=8)
    try:
        figure.savefig(path, dpi=150, format="png")
    except OSError as error:
        raise PlanError(f"{path}: cannot write the timeline: {error.strerror}") from None


def _number(action: Action) -> str:
    return f"{action.minibatch}.{action.microbatch}" if action.microbatch else str(action.minibatch)


def _stages(simulated: Simulated, rank: int) -> str:
    return ", ".join(str(place) for place in simulated.places[rank])
