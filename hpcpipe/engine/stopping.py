"""Everything that may ask a run to stop early, in one place: signals, a STOP file, the end of the allocation.

It says what is heard, and what follows from it; how all ranks come to one cut is the business of `steering`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from hpcpipe.checkpoint.sets import find_sets
from hpcpipe.config import RunConfig
from hpcpipe.engine.signals import AFTER_RANK_0_S, STOP_NAME, StopSignals, stop_file
from hpcpipe.engine.steering import STOP_FILE, TIME_IS_UP, Steering, StopRequest, longest_stop
from hpcpipe.engine.time_left import Deadline
from hpcpipe.errors import HpcpipeError
from hpcpipe.schedule import Schedule
from hpcpipe.transport.job import end_at_once
from hpcpipe.transport.world import World


class Stopping:
    """What one rank hears of requests to stop. Every rank makes one at the same time.

    signals: this process's, from here on as the run file has them; None leaves all signals as they are.
    say: takes a line for the user.
    """

    def __init__(
        self, world: World, config: RunConfig, signals: StopSignals | None, *, say: Callable[[str], None]
    ) -> None:
        self._world = world
        self._config = config
        self._directory = Path(config.run.out)
        self._signals = signals
        self._names = () if signals is None else config.run.stop_signals
        self._stop_file = stop_file(self._directory)
        if signals is not None:
            signals.end_at_once = self._end_at_once
            signals.listen(config.run.stop_signals)
        self._deadline = Deadline(world, config.run.stop_before_s)
        if self._deadline.remark is not None:
            say(self._deadline.remark)

    def line(self, schedule: Schedule) -> str:
        """What stops the run, and how soon, for the lines at its start."""
        asking = ", ".join([*self._names, str(self._directory / STOP_NAME)])
        return f"stop: {asking}; {_how_soon(schedule, self._config)}"

    def asked(self) -> StopRequest | None:
        """A request that does not come as a signal; looked for before each forward."""
        if self._stop_file():
            return StopRequest(cause=STOP_FILE, rank=self._world.rank)
        if self._deadline.passed():
            return StopRequest(cause=TIME_IS_UP, rank=self._world.rank)
        return None

    def direct_to(self, steering: Steering) -> None:
        """Hand signals to `steering`, also one that has come before."""
        if self._signals is not None:
            rank = self._world.rank
            self._signals.direct_to(lambda number: steering.request(StopRequest(cause=number, rank=rank)))

    def _end_at_once(self) -> NoReturn:
        line = f"a second SIGTERM: ending at once; {_newest(self._directory / 'checkpoints')}"
        end_at_once(self._world, line, after_s=AFTER_RANK_0_S if self._world.rank else 0.0)


def taken_up(request: StopRequest, minibatch: int, schedule: Schedule, config: RunConfig) -> str:
    """What follows from a request, when stage 0 has chosen the cut behind `minibatch`."""
    return f"{request}: stopping with a checkpoint of step {minibatch + 1}, {_how_soon(schedule, config)}"


def _newest(checkpoints: Path) -> str:
    try:
        steps = [info.step for info in find_sets(checkpoints) if info.fault is None]
    except (OSError, HpcpipeError):
        return f"what is committed stays in {checkpoints}"
    return f"the newest checkpoint is of step {max(steps)}" if steps else "there is no checkpoint"


def _how_soon(schedule: Schedule, config: RunConfig) -> str:
    timed = config.checkpoint.auto or config.checkpoint.minutes is not None
    bound = longest_stop(schedule, timed_cuts=timed)
    return f"within {bound} minibatches and one write"
