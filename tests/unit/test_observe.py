"""What a run leaves behind and shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcpipe.errors import FolderError
from hpcpipe.observe.activity import Activity
from hpcpipe.observe.metrics import MetricsFile
from hpcpipe.observe.progress import Progress
from hpcpipe.observe.record import RunRecord
from hpcpipe.schedule import Action, Op


def _lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _record(path: Path, *, log_every: int, last: int) -> RunRecord:
    return RunRecord(
        MetricsFile(path, keep_until=0),
        Progress(mode="off", total=last + 1, start=0),
        log_every=log_every,
        last=last,
        epoch=lambda minibatch: minibatch // 4,
        rows=lambda minibatch: 8,
        rate=lambda minibatch: 0.1 * minibatch,
    )


def test_metrics_of_a_resumed_run_are_cut_back_to_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path, keep_until=0)
    for step in (10, 20, 30):
        first.write({"step": step, "loss": 1.0})
        first.write({"step": step, "evaluation": {"loss": 1.0}})
    first.close()

    second = MetricsFile(path, keep_until=20)
    second.write({"step": 20, "evaluation": {"loss": 2.0}})
    second.close()

    kept = [(line["step"], "evaluation" in line) for line in _lines(path)]
    assert kept == [(10, False), (10, True), (20, False), (20, True)]
    assert _lines(path)[-1]["evaluation"] == {"loss": 2.0}


def test_a_line_that_a_killed_run_left_unfinished_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 10, "loss": 1.0}\n{"step": 20, "lo')

    MetricsFile(path, keep_until=50).close()

    assert [line["step"] for line in _lines(path)] == [10]


def test_a_torn_line_in_the_middle_is_cut_out_as_well(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 10, "loss": 1.0}\n{"step": 20, "lo\n{"step": 30, "loss": 2.0}\n')

    metrics = MetricsFile(path, keep_until=50)
    metrics.write({"step": 60, "loss": 3.0})
    metrics.close()

    assert [line["step"] for line in _lines(path)] == [10, 30, 60]


def test_metrics_that_cannot_be_opened_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()

    with pytest.raises(FolderError, match=r"metrics.jsonl: cannot be written \(Is a directory\)"):
        MetricsFile(tmp_path / "metrics.jsonl", keep_until=0)


def test_a_fresh_run_starts_a_file_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 10, "loss": 1.0}\n')

    MetricsFile(path, keep_until=0).close()

    assert path.read_text() == ""


def test_numbers_that_json_does_not_know_become_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, keep_until=0)
    metrics.write({"step": 1, "loss": float("nan"), "evaluation": {"perplexity": float("inf")}})
    metrics.close()

    assert _lines(path) == [{"step": 1, "loss": None, "evaluation": {"perplexity": None}}]


def test_losses_are_means_since_the_line_before_and_the_last_step_has_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    record = _record(path, log_every=4, last=5)
    for minibatch, loss in enumerate([1.0, 2.0, 3.0, 6.0, 5.0, 7.0]):
        record.minibatch_done(minibatch, loss)
    record.close()

    lines = _lines(path)
    assert [(line["step"], line["loss"], line["epoch"]) for line in lines] == [(4, 3.0, 0), (6, 6.0, 1)]
    assert set(lines[0]) == {"step", "epoch", "loss", "lr", "samples_per_s", "wall_s"}


def test_evaluations_stand_in_the_metrics_and_in_the_final_figures(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    record = _record(path, log_every=1, last=0)
    record.minibatch_done(0, 0.5)
    record.evaluated(0, {"loss": 0.4, "accuracy": 0.9})
    record.close()

    assert _lines(path)[-1]["evaluation"] == {"loss": 0.4, "accuracy": 0.9}
    assert record.final == {"train_loss": 0.5, "eval_loss": 0.4, "eval_accuracy": 0.9}


def test_progress_off_a_terminal_is_lines_and_the_last_step_has_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress = Progress(mode="auto", total=2, start=0)
    progress.step(1, "loss 3.0")
    progress.step(2, "loss 2.0")
    progress.close()

    assert capsys.readouterr().err.splitlines() == ["hpcpipe: step 2/2  loss 2.0  0 s left"]


def test_busy_seconds_are_those_of_passes_and_updates() -> None:
    activity = Activity(rank=0, origin=0.0, trace=False)
    for op, seconds in ((Op.FORWARD, 1.0), (Op.BACKWARD, 2.0), (Op.UPDATE, 4.0), (Op.RECEIVE_GRADIENT, 8.0)):
        activity.note(Action(op=op, stage=0, minibatch=0), 0.0, seconds)

    assert activity.busy_seconds() == 7.0
    assert activity.events == []


def test_a_timeline_has_an_event_for_each_action_with_versions() -> None:
    activity = Activity(rank=3, origin=10.0, trace=True)
    activity.note(Action(op=Op.FORWARD, stage=1, minibatch=7, version=4, distance=2), 10.5, 10.75)

    (event,) = activity.events
    assert (event["name"], event["ph"], event["pid"], event["tid"]) == ("F7", "X", 3, 1)
    assert (event["ts"], event["dur"]) == (0.5e6, 0.25e6)
    assert event["args"] == {"version": 4, "distance": 2}
