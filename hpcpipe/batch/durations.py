"""Time limits as people write them and as each scheduler wants them.

Two numbers alone, as in 4:00, are refused: they are minutes and seconds for Slurm, hours and minutes for LSF.
"""

from __future__ import annotations

import re

from hpcpipe.errors import JobError

_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)")
_UNITS = re.compile(r"(\d+)(s|min|h|d)")
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}


def parse_duration(text: str, what: str) -> int:
    """Seconds in `text`: [days-]hours:minutes:seconds, or a whole number with s, min, h or d. `what` names it.

    Raises JobError: it is no such thing, or zero.
    """
    clock, unit = _CLOCK.fullmatch(text), _UNITS.fullmatch(text)
    seconds = 0
    if clock and int(clock[3]) < 60 and int(clock[4]) < 60:
        seconds = int(clock[1] or 0) * 86400 + int(clock[2]) * 3600 + int(clock[3]) * 60 + int(clock[4])
    elif unit:
        seconds = int(unit[1]) * _SECONDS[unit[2]]
    if seconds <= 0:
        raise JobError(f'{what}: {text!r} is no time: write it as "4:00:00", "1-12:00:00", "90min" or "300s"')
    return seconds


def in_days(seconds: int) -> str:
    """As Slurm writes it: 04:00:00, 1-12:00:00."""
    days, rest = divmod(seconds, 86400)
    return (f"{days}-" if days else "") + in_hours(rest)


def in_hours(seconds: int) -> str:
    """As PBS writes it: 04:00:00, 36:00:00."""
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def in_minutes(seconds: int) -> str:
    """As LSF writes it, in hours and whole minutes, rounded up: 4:00, 36:00."""
    minutes = -(-seconds // 60)
    return f"{minutes // 60}:{minutes % 60:02d}"
