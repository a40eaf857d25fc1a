"""The life of one rank from MPI_Init to its exit code: the only place that decides how a job ends.

Either all ranks return the same code together, or one rank says why not and every rank is aborted within
seconds. It never lets a rank leave alone, because the others would wait for it for ever.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from hpcpipe.errors import EXIT_FAILURE, EXIT_REQUEUE, UserError
from hpcpipe.transport.launcher import launcher_rank
from hpcpipe.transport.world import FailedElsewhere, World

EXIT_INTERRUPTED = 130
GRACE_S = 5.0
"""How long a rank that has nothing to say waits for the one that has to end the job."""
LAST_WORDS_S = 0.2

_TOGETHER = (0, EXIT_REQUEUE)


def run_job(main: Callable[[World], int]) -> int:
    """Connect, run `main` on this rank, and return the exit code that every rank returns.

    0 and 75 (stopped by request, checkpoint committed) are returned by all ranks together. Everything else
    ends the whole job through MPI_Abort: a UserError with its one line and code 2, any other exception with a
    traceback that names the rank, `sys.exit` with its code, KeyboardInterrupt with 130, a different return
    value with that value.
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
        return _leave(world, code)
    except BaseException as error:
        _end(world, error)


def _leave(world: World, code: int) -> int:
    codes = world.all_gather_json(code, what="the exit codes of all ranks")
    if code not in _TOGETHER or any(other != code for other in codes):
        _disagree(world, codes)
    sys.stdout.flush()
    world.disconnect()
    return code


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
    if isinstance(error, UserError):
        _say(str(error))
        world.abort(error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        _say(f"rank {world.rank} was interrupted")
        world.abort(EXIT_INTERRUPTED)
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) and error.code != 0 else EXIT_FAILURE
        reason = error.code if isinstance(error.code, str) else f"sys.exit({error.code})"
        _say(f"rank {world.rank} left before the end of the job: {reason}")
        world.abort(code)
    _say(f"rank {world.rank} on {world.host} failed", _traceback(world.rank, error))
    world.abort(EXIT_FAILURE)


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
    lines = "".join(traceback.format_exception(error)).splitlines()
    return "\n".join(f"[rank {rank}] {line}" for line in lines) + "\n"


def _say(line: str, detail: str = "") -> None:
    # A stream that is closed must not keep the job from ending.
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.write(f"hpcpipe: {line}\n{detail}")
        sys.stderr.flush()
    # A launcher that hears of the abort first may drop what it has not yet read from this rank.
    time.sleep(LAST_WORDS_S)
