"""Schedules as data: pure functions from a `Schedule` to the actions of each stage. No torch, no MPI."""

from hpcpipe.schedule.actions import Action, Op, Prediction, Role
from hpcpipe.schedule.cut import StageCut, cut_at
from hpcpipe.schedule.policies import Policy, Target
from hpcpipe.schedule.program import Schedule, StageProgram
from hpcpipe.schedule.ranks import rank_actions

__all__ = [
    "Action",
    "Op",
    "Policy",
    "Prediction",
    "Role",
    "Schedule",
    "StageCut",
    "StageProgram",
    "Target",
    "cut_at",
    "rank_actions",
]
