"""The indices of a job array, as in 0-4, 0,2,5 or 1-9:2, at most so many at a time with %N behind them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpcpipe.errors import JobError

_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6})(?::(\d{1,6}))?)?")
_MOST = 10_000


@dataclass(frozen=True, kw_only=True)
class Indices:
    """`numbers` in their order, `spelled` as they were given; `at_once` of them may run, None for any number."""

    numbers: tuple[int, ...]
    spelled: str
    at_once: int | None

    @property
    def limit(self) -> str:
        """How many may run at a time, as every scheduler writes it behind the list; nothing for any number."""
        return "" if self.at_once is None else f"%{self.at_once}"


def parse_indices(text: str) -> Indices:
    """Read such a list. Raises JobError: it is none, it is empty, or it names an index twice."""
    listed, percent, most = text.partition("%")
    numbers: list[int] = []
    for part in listed.split(","):
        found = _RANGE.fullmatch(part)
        if not found:
            raise JobError(f'--array: {text!r} is no list of indices: write it as "0-4", "0,2,5" or "0-9%2"')
        first = int(found[1])
        numbers += range(first, int(found[2] or first) + 1, max(int(found[3] or 1), 1))
    if not numbers or len(numbers) > _MOST or len(set(numbers)) < len(numbers):
        raise JobError(f"--array: {text!r} must name 1 to {_MOST} indices, each once")
    if percent and not (most.isdecimal() and int(most) > 0):
        raise JobError(f"--array: {text!r}: behind % stands how many may run at a time, 1 or more")
    return Indices(numbers=tuple(numbers), spelled=listed, at_once=int(most) if percent else None)
