"""A simulated window as a Chrome trace (JSON), which Perfetto and chrome://tracing open.

    process  rank 3 (stage 1 replica 0)    a track per stage: F7, B4, U4, waits; a counter: bytes held
    process  links                         a track per port: what is on the wire

The marks are those of the traces that a real run leaves, so that both can be laid side by side.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpcpipe.errors import PlanError
from hpcpipe.schedule import Action
from hpcpipe.schedule.actions import SENDS
from hpcpipe.schedule.timeline import BUSY, MICROSECONDS, mark, trace_event
from hpcpipe.simulation.result import Simulated


def trace_events(simulated: Simulated) -> Iterator[dict[str, Any]]:
    """The trace's events, one by one: names first, then what each rank does, then what is on the links."""
    held = sorted(simulated.places.items())
    for rank, places in held:
        name = f"rank {rank} ({', '.join(str(place) for place in places)})"
        yield {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": name}}
        yield {"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}}
        for place in places:
            track = {"name": f"stage {place.stage}"}
            yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": place.stage, "args": track}
    for event in simulated.events:
        yield trace_event(event.action, event.rank, event.start, event.end)
        if event.action.op in BUSY:
            yield {
                "name": "bytes held",
                "ph": "C",
                "ts": event.end * MICROSECONDS,
                "pid": event.rank,
                "args": {"bytes": event.held},
            }
    yield from _links(simulated, process=len(held))


def _links(simulated: Simulated, process: int) -> Iterator[dict[str, Any]]:
    tracks = {name: i for i, name in enumerate(dict.fromkeys(transfer.link for transfer in simulated.transfers))}
    if tracks:
        yield {"name": "process_name", "ph": "M", "pid": process, "args": {"name": "links"}}
    for name, track in tracks.items():
        yield {"name": "thread_name", "ph": "M", "pid": process, "tid": track, "args": {"name": name}}
    for transfer in simulated.transfers:
        yield {
            "name": mark(transfer.action),
            "cat": "transfer",
            "ph": "X",
            "ts": transfer.start * MICROSECONDS,
            "dur": (transfer.end - transfer.start) * MICROSECONDS,
            "pid": process,
            "tid": tracks[transfer.link],
            "args": _ends(transfer.action),
        }


def _ends(action: Action) -> dict[str, str]:
    if action.op not in SENDS:
        return {}
    return {"from": str(action.place), "to": str(action.peer_place)}


def save_trace(simulated: Simulated, path: str | Path) -> None:
    """Write the window of `simulated` to `path`. Raises PlanError: it cannot be written."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [')
            for index, event in enumerate(trace_events(simulated)):
                file.write((",\n" if index else "\n") + json.dumps(event))
            file.write("\n]}\n")
    except OSError as error:
        raise PlanError(f"{path}: cannot write the trace: {error.strerror}") from None
