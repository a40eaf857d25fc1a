"""Takes the time of work on a device.

A CPU works while it is called; a GPU works behind what it is given, so that its time is taken by events in its own
queue. Nothing here decides what is timed.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Takes times in the order of the device's work."""

    def mark(self) -> Any:
        """A point in time, in the order of the work that has been given to the device."""

    def seconds(self, began: Any, ended: Any) -> float:
        """Seconds between two marks, once `settle` has been called behind them."""

    def settle(self) -> None:
        """Return when the device has done all it was given."""


class CpuClock:
    """The CPU does its work at once."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, began: float, ended: float) -> float:
        return ended - began

    def settle(self) -> None:
        return


class CudaClock:
    """Events on the current stream, so that taking a time never stops the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> float:
        return float(began.elapsed_time(ended)) / 1e3

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)


def clock_of(device: torch.device) -> Clock:
    """The clock for work on `device`."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()
