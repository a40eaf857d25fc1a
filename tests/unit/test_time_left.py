"""How long an allocation lasts: what Slurm's variables and commands say, and when a run stops for it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hpcpipe.config import parse_run
from hpcpipe.engine.time_left import Deadline, in_words, time_left
from hpcpipe.errors import ConfigError
from tests.oracle.lone_world import LoneWorld

NOW = 1_700_000_000.0
MINIMAL: dict[str, Any] = {"model": {"name": "mlp"}, "data": {"name": "digits"}, "optimizer": {"lr": 0.1}}


def left_of(environment: Mapping[str, str], answer: str | Exception = "") -> tuple[float | None, str]:
    """What is found where squeue gives this answer."""

    def squeue(job: str) -> str:
        assert job == environment["SLURM_JOB_ID"]
        if isinstance(answer, Exception):
            raise answer
        return answer

    found = time_left(environment, now=lambda: NOW, squeue=squeue)
    return found.seconds, found.source


def test_the_end_in_the_environment_is_taken() -> None:
    environment = {"SLURM_JOB_END_TIME": str(int(NOW) + 90), "SLURM_JOB_ID": "7"}

    assert left_of(environment, OSError("not to be asked")) == (90.0, "SLURM_JOB_END_TIME")


@pytest.mark.parametrize(
    ("left", "seconds"),
    [
        ("1-02:03:04", 93784.0),
        ("10-00:00:00", 864000.0),
        ("23:59:59", 86399.0),
        ("1:02:03", 3723.0),
        ("4:05", 245.0),
        ("0:00", 0.0),
    ],
)
def test_without_it_squeue_is_asked(left: str, seconds: float) -> None:
    assert left_of({"SLURM_JOB_ID": "7"}, f"7 {left}\n") == (seconds, "squeue")


@pytest.mark.parametrize("end", ["", "soon", "0", str(int(NOW) - 5)])
def test_an_end_that_is_none_or_has_passed_is_asked_for_as_well(end: str) -> None:
    assert left_of({"SLURM_JOB_END_TIME": end, "SLURM_JOB_ID": "7"}, "7 0:30") == (30.0, "squeue")


def test_of_the_elements_of_an_array_the_own_one_counts() -> None:
    assert left_of({"SLURM_JOB_ID": "36"}, "38 1:00\n37 2:00\n36 3:00\n") == (180.0, "squeue")


@pytest.mark.parametrize(
    ("environment", "answer", "why"),
    [
        ({}, "", "neither SLURM_JOB_END_TIME nor SLURM_JOB_ID is set"),
        ({"SLURM_JOB_ID": "7"}, "", "squeue does not know job 7"),
        ({"SLURM_JOB_ID": "7"}, "8 1:00", "squeue does not know job 7"),
        ({"SLURM_JOB_ID": "7"}, "7 UNLIMITED", "job 7 has no time limit"),
        ({"SLURM_JOB_ID": "7"}, "7 infinite", "job 7 has no time limit"),
        ({"SLURM_JOB_ID": "7"}, "7 INVALID", "squeue does not tell the end of job 7 (INVALID)"),
        ({"SLURM_JOB_ID": "7"}, "7 NOT_SET", "squeue does not tell the end of job 7 (NOT_SET)"),
        (
            {"SLURM_JOB_ID": "7"},
            FileNotFoundError(2, "No such file or directory", "squeue"),
            "squeue cannot be asked for the end of job 7 ([Errno 2] No such file or directory: 'squeue')",
        ),
        (
            {"SLURM_JOB_ID": "7"},
            subprocess.TimeoutExpired("squeue", 20.0),
            "squeue cannot be asked for the end of job 7 (no answer within 20 s)",
        ),
        (
            {"SLURM_JOB_ID": "7"},
            subprocess.CalledProcessError(1, "squeue", stderr="slurm_load_jobs error:\nUnable to contact\n"),
            "squeue cannot be asked for the end of job 7 (slurm_load_jobs error: Unable to contact)",
        ),
    ],
)
def test_an_end_that_nothing_tells_is_no_error_and_has_a_reason(
    environment: Mapping[str, str], answer: str | Exception, why: str
) -> None:
    assert left_of(environment, answer) == (None, why)


def test_squeue_is_asked_for_the_job_with_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "squeue"
    command.write_text('#!/bin/sh\n[ "$*" = "--noheader --jobs 41 --format %A %L" ] && echo 41 1:30\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    found = time_left({"SLURM_JOB_ID": "41"})

    assert (found.seconds, found.source) == (90.0, "squeue")


@pytest.mark.parametrize("name", ["squeue is missing", "squeue fails"])
def test_a_squeue_that_does_not_work_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if name.endswith("fails"):
        (tmp_path / "squeue").write_text("#!/bin/sh\necho no controller >&2\nexit 1\n")
        (tmp_path / "squeue").chmod(0o755)

    deadline = Deadline(LoneWorld(), 60.0, environment={"SLURM_JOB_ID": "41"})

    assert deadline.remark is not None
    assert deadline.remark.startswith(
        "run.stop_before has no effect: squeue cannot be asked for the end of job 41 ("
    )
    assert ("no controller" in deadline.remark) == name.endswith("fails")
    assert not deadline.passed()


def deadline_in(seconds: float, before_s: float | None) -> tuple[Deadline, list[float]]:
    """The deadline of an allocation that lasts so long yet, and its clock."""
    clock = [5000.0]
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "99999999999"}
    world = LoneWorld()
    world.broadcast_json = lambda value, *, what: {**value, "seconds": seconds}  # type: ignore[method-assign]
    return Deadline(world, before_s, environment=environment, clock=lambda: clock[0]), clock


def test_the_run_stops_so_long_before_the_end_by_a_clock_that_nobody_sets() -> None:
    deadline, clock = deadline_in(3600.0, 120.0)
    assert deadline.remark == (
        "1 h left of the allocation, says SLURM_JOB_END_TIME; the run stops 2 min before its end (run.stop_before)"
    )

    clock[0] += 3479.0
    assert not deadline.passed()
    clock[0] += 1.0
    assert deadline.passed()


def test_a_run_with_too_little_time_stops_at_once_and_says_so() -> None:
    deadline, _ = deadline_in(90.0, 120.0)

    assert deadline.passed()
    assert deadline.remark == (
        "1 min 30 s left of the allocation, says SLURM_JOB_END_TIME: no more than run.stop_before (2 min), so the "
        "run stops at its first cut"
    )


def test_without_stop_before_the_time_left_is_said_and_stops_nothing() -> None:
    deadline, clock = deadline_in(7500.0, None)
    clock[0] += 10_000.0

    assert deadline.remark == "2 h 5 min left of the allocation, says SLURM_JOB_END_TIME"
    assert not deadline.passed()


def test_outside_an_allocation_nothing_is_said_unless_stop_before_asks_for_it() -> None:
    assert Deadline(LoneWorld(), None, environment={}).remark is None
    assert Deadline(LoneWorld(), 60.0, environment={}).remark == (
        "run.stop_before has no effect: neither SLURM_JOB_END_TIME nor SLURM_JOB_ID is set"
    )


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.2, "0 s"),
        (59.7, "1 min"),
        (61, "1 min 1 s"),
        (3600, "1 h"),
        (3605, "1 h"),
        (86400 * 2 + 3599, "2 d"),
        (100000, "1 d 3 h"),
    ],
)
def test_lengths_of_time_are_said_in_two_units(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("120s", 120.0),
        ("120 s", 120.0),
        ("2min", 120.0),
        ("2 minutes", 120.0),
        ("1.5h", 5400.0),
        (".5 hours", 1800.0),
        ("1 second", 1.0),
    ],
)
def test_stop_before_is_a_time_with_its_unit(text: str, seconds: float) -> None:
    config = parse_run({**MINIMAL, "run": {"stop_before": text}}, source="run.toml")

    assert config.run.stop_before_s == seconds
    assert parse_run(config.model_dump(mode="json", exclude_none=True), source="x").run.stop_before == text


@pytest.mark.parametrize(
    "value", ["soon", "120", "0s", "0.0 h", "-5s", "5m", "1e3s", "5 s later", "", "9" * 20 + "h", 120]
)
def test_anything_else_is_refused_in_one_line(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run({**MINIMAL, "run": {"stop_before": value}}, source="run.toml")

    (line,) = str(caught.value).splitlines()
    assert line.startswith("run.toml: run.stop_before: must be a ")
