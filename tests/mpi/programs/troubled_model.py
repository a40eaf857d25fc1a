"""A small model whose layer in the middle has trouble at one of its passes; for the 64 inputs of `digits`."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import torch
from torch import Tensor, nn

SOME_BYTES = 64 << 20


class Trouble(nn.Module):
    """Passes its input on, except that the pass number `at` (from 0) raises, runs out of memory, or takes long."""

    def __init__(self, kind: str, at: int, seconds: float) -> None:
        super().__init__()
        self.kind, self.at, self.seconds = kind, at, seconds
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.passes == self.at:
            if self.kind == "raise":
                raise ValueError("the forward pass broke")
            if self.kind == "allocate":
                # Little more than what is there already.
                size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (size + SOME_BYTES, size + SOME_BYTES))
                torch.ones(2 * SOME_BYTES)
            if self.kind == "sleep":
                time.sleep(self.seconds)
        self.passes += 1
        return x


def build(kind: str, at: int = 3, seconds: float = 0.0) -> list[tuple[str, nn.Module]]:
    """Three layers with the trouble in the middle one."""
    middle = nn.Sequential(nn.Linear(32, 32), Trouble(kind, at, seconds))
    return [("first", nn.Linear(64, 32)), ("middle", middle), ("last", nn.Linear(32, 10))]
