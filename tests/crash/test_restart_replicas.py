"""Runs with replicated stages that are killed, stopped or moved to another plan go on as they should."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from hpcpipe.checkpoint.sets import choose
from tests.crash.killing import (
    TIME_LIMIT_S,
    digest_of,
    kill_one_rank,
    losses_of,
    ranks_of,
    run_file_of,
    running,
    train,
    wait_for_steps,
)


def replicated(*counts: int) -> list[str]:
    return ["--set", f"pipeline.replicas={list(counts)}"]


def test_a_run_whose_sums_are_of_three_killed_at_any_moment_and_resumed_equals_the_unbroken_one_to_the_bit(
    tmp_path: Path,
) -> None:
    run_file, ranks, options = run_file_of(tmp_path, "spectrain", "sgd"), 4, replicated(3, 1)
    unbroken = train(run_file, tmp_path / "unbroken", *options, ranks=ranks)
    assert unbroken.rc == 0, str(unbroken)
    chooser = random.Random(31)

    for _ in range(2):
        after_s = chooser.uniform(0.3, 0.7) * unbroken.seconds
        code = kill_one_rank(
            run_file, tmp_path / "killed", *options, after_s=after_s, chooser=chooser, ranks=ranks
        )
        assert code != 0
    last = train(run_file, tmp_path / "killed", "--resume", "auto", *options, ranks=ranks)

    assert last.rc == 0, str(last)
    assert digest_of(tmp_path / "killed") == digest_of(tmp_path / "unbroken")
    assert losses_of(tmp_path / "killed") == losses_of(tmp_path / "unbroken")


@pytest.mark.parametrize(("before", "after"), [((2, 1), (1, 2)), ((3,), (1, 1)), ((1, 1), (2, 1))])
def test_a_restart_on_other_replicas_goes_on_from_the_weights_of_the_cut(
    tmp_path: Path, before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    run_file, out = run_file_of(tmp_path, "spectrain", "adamw"), tmp_path / "run"
    assert train(run_file, out, "--set", "run.epochs=2", *replicated(*before), ranks=sum(before)).rc == 0

    more = ["--resume", "auto", "--set", "run.epochs=4", *replicated(*after)]
    resumed = train(run_file, out, *more, ranks=sum(after))

    assert resumed.rc == 0, str(resumed)
    assert "equivalent, not bit-identical" in resumed.stderr
    losses = dict(losses_of(out))
    assert sorted(losses) == list(range(1, 181))
    # It goes on where it was, and downwards.
    assert losses[91] < 1.5 * sum(losses[step] for step in range(81, 91)) / 10
    assert losses[91] < 0.8 * losses[1]
    assert sum(losses[step] for step in range(160, 181)) < sum(losses[step] for step in range(91, 112))


@pytest.mark.parametrize("place", [0, -1])
def test_a_request_to_any_replica_stops_all_at_one_cut_that_continues_to_the_bit(
    tmp_path: Path, place: int
) -> None:
    run_file, out, options = run_file_of(tmp_path, "spectrain"), tmp_path / "stopped", replicated(1, 2, 1)
    longer = [*options, "--set", "run.epochs=40", "--set", "lr_schedule.total=1800"]
    with running(run_file, out, *longer, ranks=4) as process:
        wait_for_steps(out, 30)
        os.kill(ranks_of(process)[place], signal.SIGUSR1)
        _, stderr = process.communicate(timeout=TIME_LIMIT_S)
    assert process.returncode == 75, stderr

    stopped_at = choose(out, deep=True)[0].step
    assert stopped_at % 2 == 0
    until = ["--set", f"run.max_steps={stopped_at + 20}"]
    resumed = train(run_file, out, "--resume", "auto", *longer, *until, ranks=4)
    assert "continues it to the bit" in resumed.stderr, str(resumed)
    whole = train(run_file, tmp_path / "whole", *longer, *until, "--set", "checkpoint.every=0", ranks=4)
    assert (resumed.rc, whole.rc) == (0, 0)
    assert digest_of(out) == digest_of(tmp_path / "whole")
