"""Chrome traces and timelines of a simulated window."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcpipe.errors import PlanError
from hpcpipe.observe.activity import Activity
from hpcpipe.simulation import Simulated
from hpcpipe.simulation.plot import save_timeline
from hpcpipe.simulation.trace import save_trace, trace_events
from tests.unit.schedule_cases import pipedream
from tests.unit.simulation_cases import links, run, unit

PNG = b"\x89PNG\r\n\x1a\n"


def simulated(window: tuple[int, int] = (0, 4)) -> Simulated:
    costs = unit(output_bytes=1, input_gradient_bytes=1, ready=((1.0, 2),), saved_bytes=5)
    return run(pipedream(replicas=(2, 1), minibatches=8), costs, links(2, 4), window=window)


def of_phase(found: Simulated, phase: str) -> list[dict[str, Any]]:
    return [event for event in trace_events(found) if event["ph"] == phase]


# -- the window --------------------------------------------------------------------------------------------


def test_only_what_concerns_the_window_is_kept() -> None:
    found = simulated((2, 4))

    assert {event.action.minibatch for event in found.events} == {2, 3}
    assert {transfer.action.minibatch for transfer in found.transfers} == {2, 3}


def test_nothing_is_kept_unless_asked() -> None:
    found = run(pipedream())

    assert found.events == found.transfers == ()


# -- the trace ---------------------------------------------------------------------------------------------


def test_a_trace_is_json_with_named_processes_and_passes_in_microseconds(tmp_path: Path) -> None:
    save_trace(simulated(), tmp_path / "trace.json")

    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["rank 0 (stage 0)", "rank 1 (stage 0 replica 1)", "rank 2 (stage 1)", "links"]
    (first,) = [event for event in events if event["name"] == "F0" and event["pid"] == 0]
    assert (first["ts"], first["dur"], first["cat"]) == (0.0, 1e6, "busy")


def test_links_and_all_reduces_have_tracks_of_their_own() -> None:
    events = of_phase(simulated(), "X")

    sent = {event["name"]: event for event in events if event["cat"] == "transfer"}
    assert sent["F>1"]["args"] == {"from": "stage 0 replica 1", "to": "stage 1"}
    tracks = [
        e["args"]["name"] for e in of_phase(simulated(), "M") if e["pid"] == 3 and e["name"] == "thread_name"
    ]
    assert "level1 link out of ranks 0 to 1" in tracks
    assert "all-reduce of stage 0" in tracks


def test_memory_is_a_counter() -> None:
    counted = [event["args"]["bytes"] for event in of_phase(simulated(), "C") if event["pid"] == 2]

    assert max(counted) == 5
    assert counted[-1] == 0


def test_a_simulated_trace_names_actions_as_a_real_one_does() -> None:
    found = simulated()
    activity = Activity(rank=0, origin=0.0, trace=True)
    for event in found.events:
        if event.rank == 0:
            activity.note(event.action, event.start, event.end)

    shown = [event for event in of_phase(found, "X") if event["pid"] == 0]

    same = ("name", "cat", "ph", "pid", "tid", "args")
    assert [{key: event[key] for key in same} for event in shown] == [
        {key: event[key] for key in same} for event in activity.events
    ]


def test_a_trace_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot write the trace: No such file"):
        save_trace(simulated(), tmp_path / "nowhere" / "trace.json")


# -- the timeline ------------------------------------------------------------------------------------------


def test_a_timeline_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    save_timeline(simulated(), tmp_path / "timeline", window=(0, 4))

    assert (tmp_path / "timeline").read_bytes().startswith(PNG)


def test_a_timeline_without_matplotlib_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)

    with pytest.raises(PlanError, match=r"^a timeline needs matplotlib: pip install hpcpipe\[plots\]$"):
        save_timeline(simulated(), tmp_path / "timeline.png", window=(0, 4))


def test_an_empty_window_draws_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    with pytest.raises(PlanError, match="ask for another --window"):
        save_timeline(simulated((50, 60)), tmp_path / "timeline.png", window=(50, 60))


def test_a_timeline_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    with pytest.raises(PlanError, match="cannot write the timeline: No such file"):
        save_timeline(simulated(), tmp_path / "nowhere" / "timeline.png", window=(0, 4))
