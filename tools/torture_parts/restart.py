"""The last part of a trial: the run is started again, undisturbed, and comes to what it would have come to."""

from __future__ import annotations

from .runs import Unbroken, started_at
from .trials import Trial


def check_restart(trial: Trial, unbroken: Unbroken, *, limit_s: float) -> None:
    """Go on with the run in the trial's folder; notes a wrong start or end, and every bit that differs.

    Raises HungError.
    """
    out = trial.folder / "out"
    expected, difference = unbroken.newest_differs(out / "checkpoints")
    if difference is not None:
        trial.fail(difference, wrong=True)
    with unbroken.case.job(trial.folder, "again") as job:
        code = job.end(limit_s=limit_s)
        start = started_at(job.said())
    if code:
        trial.fail(f"started again, the run ended with exit code {code}; see again.log")
        return
    if start != expected:
        trial.fail(f"started again, the run went on from step {start}, not from {expected}")
    check_end(trial, unbroken)


def check_end(trial: Trial, unbroken: Unbroken) -> None:
    """Note how the run in the trial's folder, which has ended, differs from the unbroken one."""
    if difference := unbroken.differs(trial.folder / "out"):
        trial.fail(difference, wrong=True)
