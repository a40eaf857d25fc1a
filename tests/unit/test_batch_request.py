from __future__ import annotations

import pytest

from hpcpipe.batch.durations import in_days, in_hours, in_minutes, parse_duration
from hpcpipe.batch.indices import parse_indices
from hpcpipe.errors import JobError
from tests.unit.batch_cases import request


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("4:00:00", 14400), ("1-12:00:00", 129600), ("90min", 5400), ("300s", 300), ("2h", 7200), ("1d", 86400)],
)
def test_times_are_read_as_people_write_them(text: str, seconds: int) -> None:
    assert parse_duration(text, "--time") == seconds


@pytest.mark.parametrize("text", ["4:00", "240", "0:00:00", "1:60:00", "0s", "-1h", "four hours", ""])
def test_a_time_that_schedulers_read_differently_or_not_at_all_is_refused(text: str) -> None:
    with pytest.raises(JobError, match=r"--time: .* is no time: write it as"):
        parse_duration(text, "--time")


def test_each_scheduler_gets_its_own_spelling() -> None:
    assert [in_days(129_661), in_hours(129_661), in_minutes(129_661)] == ["1-12:01:01", "36:01:01", "36:02"]
    assert [in_days(59), in_hours(59), in_minutes(59)] == ["00:00:59", "00:00:59", "0:01"]


@pytest.mark.parametrize(
    ("text", "numbers", "at_once"),
    [
        ("0-4", (0, 1, 2, 3, 4), None),
        ("7", (7,), None),
        ("0,2,5-6", (0, 2, 5, 6), None),
        ("1-9:4%2", (1, 5, 9), 2),
    ],
)
def test_indices_are_read_as_slurm_writes_them(text: str, numbers: tuple[int, ...], at_once: int | None) -> None:
    indices = parse_indices(text)

    assert (indices.numbers, indices.at_once) == (numbers, at_once)
    assert indices.spelled == text.partition("%")[0]


@pytest.mark.parametrize("text", ["", "a", "4-0", "1,1", "0-99999", "1-3%0", "1-3%", "1-3%x", "1--3", "1,"])
def test_a_list_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(JobError, match="--array"):
        parse_indices(text)


@pytest.mark.parametrize(
    ("scheduler", "changes", "message"),
    [
        ("pbs", {"launcher": "srun"}, "--launcher srun: belongs to Slurm, not to pbs"),
        ("slurm", {"launcher": "mpirun", "signal": "USR2"}, "dies of SIGUSR2"),
        ("slurm", {"time_s": None}, "--time: is needed"),
        ("slurm", {"time_s": 300, "signal_before_s": 300}, "--signal-before: 300 s must be less than"),
        ("lsf", {"indices": parse_indices("0-4")}, "indices of LSF begin with 1"),
        ("pbs", {"indices": parse_indices("1,3")}, "PBS knows one range only"),
        ("slurm", {"name": "two words"}, "--name: 'two words' must be"),
        ("slurm", {"setup": ("module load a\nb",)}, "--setup: must be one line"),
    ],
)
def test_what_contradicts_itself_is_refused_in_one_line(
    scheduler: str, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(JobError) as caught:
        request(scheduler, **changes)

    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
