"""Schedules as data: pure functions from a `Schedule` to the actions of each replica. No torch, no MPI."""

from hpcpipe.schedule.actions import BARRIERS, Action, Op, Place, Prediction, Role
from hpcpipe.schedule.cut import StageCut, cut_at
from hpcpipe.schedule.policies import Policy, Target
from hpcpipe.schedule.program import StageProgram
from hpcpipe.schedule.ranks import rank_actions
from hpcpipe.schedule.schedule import Schedule, warm_up_of

__all__ = [
    "BARRIERS",
    "Action",
    "Op",
    "Place",
    "Policy",
    "Prediction",
    "Role",
    "Schedule",
    "StageCut",
    "StageProgram",
    "Target",
    "cut_at",
    "rank_actions",
    "warm_up_of",
]
