"""The life of one rank from MPI_Init to its exit code: the only place that decides how a job ends.

Either all ranks return the same code together, or one rank says why not and every rank is aborted within
seconds. It never lets a rank leave alone, because the others would wait for it for ever.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from hpcpipe.errors import EXIT_DONE, EXIT_FAILURE, EXIT_REQUEUE, EXIT_TERMINATED, FailedElsewhere, UserError
from hpcpipe.transport.launcher import launcher_rank
from hpcpipe.transport.out_of_memory import REMEDY, is_out_of_memory
from hpcpipe.transport.world import World

EXIT_INTERRUPTED = 130
GRACE_S = 5.0
"""How long a rank that has nothing to say waits for the one that has to end the job."""
LAST_WORDS_S = 0.2
LAST_ONE_S = 3.0
"""How long rank 0 stays behind the others before it leaves with 75: `srun --kill-on-bad-exit` then kills whoever
is left and reports that instead. The others need it to close their GPU, and their nodes to tell srun."""

_TOGETHER = (0, EXIT_REQUEUE)


def run_job(main: Callable[[World], int], *, leaving: Callable[[], None] = lambda: None) -> int:
    """Connect, run `main` on this rank, and return the exit code of this process.

    0 and 75 (stopped by request, checkpoint committed) are the verdict of all ranks together. 75 is returned on
    rank 0 alone, some time after the others have returned 0; a launcher's code is the largest one or all bits of
    them. `leaving` is called at the very end, when they have agreed.

    Everything else ends the whole job through MPI_Abort: a UserError with its one line and code 2, any other
    exception with a traceback that names the rank, `sys.exit` with its code, KeyboardInterrupt with 130, a
    different return value with that value.
    """
    try:
        world = World.connect()
    except UserError as error:
        return _refuse(error)
    except BaseException:
        # Other ranks may have got further: leaving without MPI_Finalize makes the launcher end them.
        _say("could not start MPI", traceback.format_exc())
        os._exit(EXIT_FAILURE)
    try:
        code = main(world)
        return _leave(world, code, leaving)
    except BaseException as error:
        _end(world, error)


def end_at_once(world: World, reason: str, *, after_s: float = 0.0) -> NoReturn:
    """End the whole job with 143 and one line, from within a signal handler if need be.

    `after_s` leaves another rank, which may do the same, the time to do it first.
    """
    time.sleep(after_s)
    world.farewell(EXIT_TERMINATED)
    # The handler may have interrupted a write to the same stream, which refuses another one.
    with contextlib.suppress(OSError):
        os.write(2, f"hpcpipe: rank {world.rank} on {world.host}: {reason}\n".encode())
    time.sleep(LAST_WORDS_S)
    world.abort(EXIT_TERMINATED)


def _leave(world: World, code: int, leaving: Callable[[], None]) -> int:
    codes = world.all_gather_json(code, what="the exit codes of all ranks")
    if code not in _TOGETHER or any(other != code for other in codes):
        _disagree(world, codes)
    _close_to_signals()
    sys.stdout.flush()
    world.disconnect()
    if code == EXIT_REQUEUE:
        # Never by os._exit: MPICH takes leave of its launcher when the C library does.
        if world.rank != 0:
            code = EXIT_DONE
        elif world.size > 1:
            time.sleep(LAST_ONE_S)
    leaving()
    return code


def _close_to_signals() -> None:
    """No signal changes the exit code once all ranks agree on it."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            # An ignored SIGCHLD would leave nothing to wait for.
            signal.signal(number, signal.SIG_DFL if number == signal.SIGCHLD else signal.SIG_IGN)


def _disagree(world: World, codes: list[int]) -> NoReturn:
    # One rank speaks and aborts, as launchers combine the codes of several in ways of their own.
    failed = [rank for rank, code in enumerate(codes) if code not in _TOGETHER]
    speaker, verdict = (failed[0], codes[failed[0]]) if failed else (0, EXIT_FAILURE)
    if world.rank != speaker:
        _await_abort(world, verdict)
    if not failed:
        _say(f"the ranks end with different exit codes: {codes}")
    world.abort(verdict)


def _end(world: World, error: BaseException) -> NoReturn:
    if isinstance(error, FailedElsewhere):
        _await_abort(world, error.exit_code)
    code, line, detail = _verdict(world, error)
    # First of all, so that whoever waits for this rank does not take it for lost.
    world.farewell(code)
    _say(line, detail)
    world.abort(code)


def _verdict(world: World, error: BaseException) -> tuple[int, str, str]:
    """The exit code of the job, the line that says why, and a traceback where one is of use."""
    if isinstance(error, UserError):
        return error.exit_code, str(error), ""
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED, f"rank {world.rank} was interrupted", ""
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) and error.code != 0 else EXIT_FAILURE
        reason = error.code if isinstance(error.code, str) else f"sys.exit({error.code})"
        return code, f"rank {world.rank} left before the end of the job: {reason}", ""
    if is_out_of_memory(error):
        return EXIT_FAILURE, _out_of_memory(world), _traceback(world.rank, error)
    return EXIT_FAILURE, f"rank {world.rank} on {world.host} failed", _traceback(world.rank, error)


def _out_of_memory(world: World) -> str:
    task = world.waiter.task()
    at = "" if task is None else f" at {task[0]}"
    return f"{world.waiter.subject()} on {world.host} ran out of memory{at}: {REMEDY}"


def _refuse(error: UserError) -> int:
    # Without a common world each process is alone: the launcher's rank 0 speaks, and the others leave it the time,
    # as a launcher that sees one of them end may kill the rest.
    if launcher_rank(os.environ) == 0:
        _say(str(error))
    else:
        time.sleep(1.0)
    return error.exit_code


def _await_abort(world: World, code: int) -> NoReturn:
    time.sleep(GRACE_S)
    world.abort(code)


def _traceback(rank: int, error: BaseException) -> str:
    try:
        lines = "".join(traceback.format_exception(error)).splitlines()
    except MemoryError:
        # There may be none left to say more in.
        lines = [f"{type(error).__name__}"]
    return "\n".join(f"[rank {rank}] {line}" for line in lines) + "\n"


def _say(line: str, detail: str = "") -> None:
    # A stream that is closed must not keep the job from ending.
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.write(f"hpcpipe: {line}\n{detail}")
        sys.stderr.flush()
    # A launcher that hears of the abort first may drop what it has not yet read from this rank.
    time.sleep(LAST_WORDS_S)
