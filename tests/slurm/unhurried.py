"""A model that naps in every forward: its runs take their time on a machine of any speed, and none of its cores.

How long is said by a variable and not by the run file: to hpcpipe, runs that nap are the same as runs that do not.
A job naps only until it is started again.
"""

from __future__ import annotations

import os
import time

from torch import Tensor, nn

NAP = "UNHURRIED_NAP_S"


class Unhurried(nn.Linear):
    """A linear layer that first does nothing for a while."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        started_again = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
        self._nap_s = 0.0 if started_again else float(os.environ.get(NAP, "0"))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self._nap_s)
        return super().forward(x)


def build() -> nn.Sequential:
    """Four layers for rows of 64 numbers and ten classes."""
    return nn.Sequential(Unhurried(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Linear(32, 10))
