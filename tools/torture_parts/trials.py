"""What came of each trial, and the table of all."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcpipe.errors import HpcpipeError

from .jobs import HungError, kill_all_jobs

TITLES = ("kind", "trials", "as specified", "hangs", "wrong", "seconds to the end: min", "median", "max")


@dataclass(kw_only=True)
class Trial:
    """One trial: `what` was done, in words, and every way in which the outcome was not as specified.

    `hung`: something did not end. `wrong`: it ended with other bits than it should have. `seconds`: from what was
    done to the end of it. `about` counts what was met (`during a write`), for one line over all trials.
    """

    kind: str
    name: str
    what: str
    folder: Path
    seconds: float = 0.0
    hung: bool = False
    wrong: bool = False
    faults: list[str] = field(default_factory=list)
    about: tuple[str, ...] = ()

    @property
    def as_specified(self) -> bool:
        return not self.faults

    def fail(self, fault: str, *, hung: bool = False, wrong: bool = False) -> None:
        """Note one way in which it failed."""
        self.faults.append(fault)
        self.hung |= hung
        self.wrong |= wrong


@contextmanager
def noting(trial: Trial) -> Iterator[None]:
    """Note a hang in the block, and whatever keeps it from its end, as faults of the trial."""
    try:
        yield
    except HungError as hung:
        trial.fail(str(hung), hung=True)
    except (OSError, HpcpipeError) as error:
        trial.fail(f"{type(error).__name__}: {error}")


Task = Callable[[], Sequence[Trial]]


def carry_out(tasks: Iterable[Task], jobs: int) -> Iterator[Sequence[Trial]]:
    """Do all tasks, `jobs` at a time; the trials of each as it ends."""
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        try:
            for future in as_completed([pool.submit(task) for task in tasks]):
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            kill_all_jobs()
            raise


def row(kind: str, trials: Sequence[Trial]) -> dict[str, Any]:
    """The figures of one kind, by the titles of the table's columns."""
    seconds = [trial.seconds for trial in trials] or [0.0]
    figures = (
        kind,
        len(trials),
        sum(trial.as_specified for trial in trials),
        sum(trial.hung for trial in trials),
        sum(trial.wrong for trial in trials),
        *(round(figure, 2) for figure in (min(seconds), statistics.median(seconds), max(seconds))),
    )
    return dict(zip(TITLES, figures, strict=True))


def table(kinds: dict[str, list[Trial]]) -> list[str]:
    """One line a kind, below the titles."""
    rows = [TITLES, *(tuple(map(str, row(kind, trials).values())) for kind, trials in kinds.items())]
    widths = [max(len(line[i]) for line in rows) for i in range(len(TITLES))]
    return [
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))]
        )
        for line in rows
    ]


def met(trials: Iterable[Trial]) -> dict[str, int]:
    """How many trials met what, by the words of their `about`."""
    return dict(sorted(Counter(word for trial in trials for word in trial.about).items()))
