"""The drawing shows what the lists say, in as much width as there is."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcpipe.schedule import Op, Place, Policy, Schedule
from hpcpipe.schedule.draw import draw, legend, report, table, title
from hpcpipe.schedule.verify import verify
from tests.unit.schedule_cases import groupings, lists_of, pipedream, schedules


def rows(drawing: str) -> list[str]:
    """The rows of passes, without names."""
    return [line for line in drawing.splitlines() if re.match(r"(rank \d+ )?stage", line)]


def test_the_asynchronous_schedule_with_a_stash() -> None:
    assert draw(pipedream(stages=3, minibatches=4)) == "\n".join(
        [
            "time      0              5             10",
            "stage 0  F0 F1 F2  ·  · B0 F3 B1  · B2  · B3",
            "weights   0  0  0        0  1  0     0     1",
            "stage 1   · F0 F1  · B0 F2 B1 F3 B2  · B3  ·",
            "weights      0  0     0  1  0  2  1     2",
            "stage 2   ·  · F0 B0 F1 B1 F2 B2 F3 B3  ·  ·",
            "weights         0  0  1  1  2  2  3  3",
        ]
    )


def test_predictions_are_shown_beside_the_version_they_start_from() -> None:
    assert draw(pipedream(Policy.SPECTRAIN, stages=2, minibatches=3)).splitlines()[1:3] == [
        "stage 0   F0  F1   ·  B0  F2  B1   ·  B2",
        "weights    0 0+1       0 1+1   1       2",
    ]


def test_microbatches_are_named_where_there_are_several() -> None:
    drawing = draw(Schedule(name="gpipe", stages=2, minibatches=1, microbatches=2))

    assert rows(drawing) == [
        "stage 0  F0.0 F0.1    ·    · B0.0 B0.1",
        "stage 1     · F0.0 F0.1 B0.0 B0.1    ·",
    ]


def test_a_rank_with_two_stages_does_one_pass_at_a_time_and_evaluates_in_between() -> None:
    schedule = replace(pipedream(stages=2, minibatches=3), evaluate_every=2, evaluation_batches=2)

    assert rows(draw(schedule, [[Place(0), Place(1)]])) == [
        "rank 0 stage 0  F0 F1  ·  · B0  · F2  · B1 E0 E1  ·  ·  ·  · B2",
        "rank 0 stage 1   ·  · F0 B0  · F1  · B1  ·  ·  · E0 E1 F2 B2  ·",
    ]


def test_replicas_have_rows_of_their_own_and_update_together() -> None:
    assert draw(pipedream(replicas=(2, 1), minibatches=5)) == "\n".join(
        [
            "time                0              5             10",
            "stage 0 replica 0  F0 F2  · B0  ·  · F4 B2  ·  ·  · B4",
            "weights             0  0     0        2  0           2",
            "stage 0 replica 1  F1 F3  ·  ·  · B1  ·  ·  · B3  ·  ·",
            "weights             0  0           0           0",
            "stage 1             · F0 B0 F1 B1 F2 B2 F3 B3 F4 B4  ·",
            "weights                0  0  1  1  2  2  3  3  4  4",
        ]
    )


@settings(max_examples=20, deadline=None)
@given(schedules(stages=3, minibatches=12, replicas=3))
def test_each_pass_of_a_replica_is_drawn_once(schedule: Schedule) -> None:
    drawn = rows(draw(schedule, width=100_000))

    for row, actions in zip(drawn, lists_of(schedule), strict=True):
        marks = [mark[0] for mark in row.split() if mark[0] in "FBE"]
        passes = [a.op.value for a in actions if a.op in (Op.FORWARD, Op.BACKWARD, Op.EVALUATE)]
        assert sorted(marks) == sorted(passes)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_each_pass_is_drawn_once_and_no_rank_does_two_at_once(data: st.DataObject) -> None:
    schedule = data.draw(schedules(minibatches=12))
    ranks = data.draw(groupings(schedule.stages)) or [[place] for place in schedule.places]

    drawn = iter(rows(draw(schedule, ranks, width=100_000)))

    for stages, actions in zip(ranks, lists_of(schedule, ranks), strict=True):
        cells = [next(drawn).split("stage", 1)[1].split()[1:] for _ in stages]
        marks = [mark for row in cells for mark in row if mark != "·"]
        passes = [a for a in actions if a.op in (Op.FORWARD, Op.BACKWARD, Op.EVALUATE)]
        assert sorted(mark[0] for mark in marks) == sorted(a.op.value for a in passes)
        assert all(sum(mark != "·" for mark in column) <= 1 for column in zip(*cells, strict=True))


@pytest.mark.parametrize("width", [40, 80, 133])
def test_a_long_schedule_is_cut_to_the_width_and_says_so(width: int) -> None:
    schedule = pipedream(Policy.SPECTRAIN, stages=4, minibatches=500)

    *lines, note = draw(schedule, width=width).splitlines()

    assert max(map(len, lines)) <= width
    assert max(map(len, lines)) > width - 10
    columns = len(rows("\n".join(lines))[0].split()) - 2
    assert note == f"cut off after {columns} units of time: ask for fewer minibatches or widen the terminal"


def test_what_is_cut_off_changes_nothing_in_what_is_shown() -> None:
    short, long = (pipedream(Policy.SPECTRAIN, stages=8, minibatches=count) for count in (300, 10**9))

    assert draw(short, width=200) == draw(long, width=200)


def test_nothing_to_draw_is_drawn_as_nothing() -> None:
    assert rows(draw(pipedream(stages=2, minibatches=0))) == ["stage 0   ·", "stage 1   ·"]


def test_colours_go_round_the_marks_and_leave_the_columns_alone() -> None:
    schedule = pipedream(Policy.SPECTRAIN, stages=3, minibatches=5)

    painted = draw(schedule, paint=lambda text, op: f"<{op.name if op else ''}|{text}>")

    assert "<FORWARD|F0>" in painted
    assert "<BACKWARD|B4>" in painted
    assert re.sub(r"<[A-Z]*\||>", "", painted) == draw(schedule)


def test_the_legend_explains_only_what_can_be_seen() -> None:
    stash, spectrain = pipedream(Policy.STASH), pipedream(Policy.SPECTRAIN)
    evaluating = replace(stash, evaluate_every=2, evaluation_batches=1)

    assert "predicted" not in legend(stash)
    assert "4+2 is predicted from version 4, 2 updates ahead" in legend(spectrain)
    assert "evaluation" not in legend(stash)
    assert "E0 evaluation batch 0" in legend(evaluating)
    assert "an update follows B3.3" in legend(Schedule(name="gpipe", stages=4, minibatches=1, microbatches=4))


def test_the_title_says_which_schedule_it_is() -> None:
    assert title(pipedream(Policy.SPECTRAIN, stages=4, minibatches=8)) == (
        "pipedream, 4 stages on 4 ranks, 8 minibatches, spectrain (round_trip)"
    )
    assert title(replace(pipedream(stages=2, minibatches=1), drain_every=5), [[Place(0), Place(1)]]) == (
        "pipedream, 2 stages on 1 rank, 1 minibatch, stash, drained every 5"
    )
    assert title(Schedule(name="1f1b", stages=2, minibatches=3, microbatches=2)) == (
        "1f1b, 2 stages on 2 ranks, 3 minibatches of 2 microbatches, flushed before every update"
    )


def test_the_table_of_four_stages_with_predictions() -> None:
    assert table(verify(pipedream(Policy.SPECTRAIN, stages=4, minibatches=12)).stages) == "\n".join(
        [
            "stage  warm-up  in flight  staleness  distance F  distance B  versions held",
            "    0        3          4          3           3           0              1",
            "    1        2          3          2           2           0              1",
            "    2        1          2          1           2           1              1",
            "    3        0          1          0           1           1              1",
        ]
    )


def test_replicas_with_the_same_figures_share_a_line_of_the_table() -> None:
    assert table(verify(pipedream(replicas=(3, 2, 1), minibatches=4)).stages) == "\n".join(
        [
            "stage  replicas  warm-up  in flight  staleness  distance F  distance B  versions held",
            "    0         0        1          2          1           0           0              2",
            "    0       1-2        0          1          0           0           0              1",
            "    1       0-1        1          2          1           0           0              2",
            "    2         0        0          1          0           0           0              1",
        ]
    )


def test_the_title_and_the_legend_speak_of_replicas_where_there_are_some() -> None:
    schedule = pipedream(replicas=(3, 1))

    assert title(schedule).startswith("pipedream, 2 stages (3, 1 replicas) on 4 ranks, ")
    assert "the replicas of a stage update together" in legend(schedule)


def test_the_report_of_replicas_names_them_and_counts_their_common_updates_once() -> None:
    lines = report(verify(pipedream(replicas=(3, 1), minibatches=9))).splitlines()

    assert lines[2] == "every pass done once: 18 forwards, 18 backwards, 12 updates, 0 evaluations"
    assert "cuts: all 3 checked: a run resumed there does what the unbroken one does" in lines
    assert "  stage 0 replicas 0-2: 0 1 x2" in lines
    assert "  stage 1: 0 x9" in lines
    assert "  activation: 0.0->1 2, 0.1->1 2, 0.2->1 2" in lines


def test_the_report_has_a_line_for_each_proof() -> None:
    lines = report(verify(pipedream(Policy.SPECTRAIN, stages=4, minibatches=6))).splitlines()

    assert lines[1] == "every send received: 36 messages on 6 channels, once and in order"
    starts = [line.split(":")[0] for line in lines[:7]]
    assert starts == [
        "no deadlock",
        "every send received",
        "every pass done once",
        "versions",
        "releases",
        "predictions",
        "cuts",
    ]
    assert "  stage 0: 0 1 2 3 x3" in lines
    assert "  stage 2: 1 2 x5 and 1 x6" in lines
    assert "  activation: 0->1 4, 1->2 3, 2->3 2" in lines
