"""What a simulation writes down for a timeline: the actions and transfers of a bounded window of minibatches."""

from __future__ import annotations

from typing import NamedTuple

from hpcpipe.schedule import Action


class Event(NamedTuple):
    """`action` took rank `rank` from `start` to `end` (seconds), waiting included; then it held `held` bytes."""

    rank: int
    action: Action
    start: float
    end: float
    held: int


class Transfer(NamedTuple):
    """The message of the send `action` occupied the port `link` from `start` to `end` (seconds).

    Or a bucket of a stage's all-reduce: then `link` says so, and `action` is R of a minibatch of its round.
    """

    link: str
    action: Action
    start: float
    end: float


class Recorder:
    """Keeps what concerns minibatches from `window[0]` to before `window[1]`, and nothing else."""

    def __init__(self, window: tuple[int, int]) -> None:
        self.window = window
        self.events: list[Event] = []
        self.transfers: list[Transfer] = []
