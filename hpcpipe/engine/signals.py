"""Requests to stop that come from outside: signals and a file named STOP in the run's folder.

A handler only sets a flag; what follows is decided between actions by `steering`.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

LOOK_EVERY_S = 1.0


def on_signals(names: Sequence[str], request: Callable[[], None]) -> None:
    """Call `request` when one of the named signals arrives at this process."""

    def handle(number: int, frame: FrameType | None) -> None:
        request()

    for name in names:
        signal.signal(signal.Signals[name], handle)


def stop_file(directory: Path) -> Callable[[], bool]:
    """A question that looks for a file named STOP in `directory`, once a second at most."""
    path = directory / "STOP"
    looked = float("-inf")

    def asked() -> bool:
        nonlocal looked
        now = time.monotonic()
        if now - looked < LOOK_EVERY_S:
            return False
        looked = now
        return path.exists()

    return asked
