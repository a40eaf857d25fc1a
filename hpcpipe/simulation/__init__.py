"""Discrete-event simulation of any schedule's action lists: what a run would do, without running it. No torch, no
MPI."""

from hpcpipe.simulation.costs import StageCosts
from hpcpipe.simulation.events import Event, Transfer
from hpcpipe.simulation.result import Resource, Simulated, Steady
from hpcpipe.simulation.simulate import simulate
from hpcpipe.simulation.whatif import WhatIf

__all__ = [
    "Event",
    "Resource",
    "Simulated",
    "StageCosts",
    "Steady",
    "Transfer",
    "WhatIf",
    "simulate",
]
