"""The ranks of this job and the MPI library behind them: the only module that imports `mpi4py.MPI`.

It owns one duplicated communicator that raises its errors, point-to-point calls on plain addresses, and
collectives of JSON and small arrays built on nonblocking calls and the waiter. Nothing is ever pickled, and no
call but `members` blocks inside MPI.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from hpcpipe.errors import EXIT_FAILURE, FailedElsewhere, HpcpipeError, LauncherError, TransportError
from hpcpipe.transport.deadline import end_within, limited
from hpcpipe.transport.launcher import check_launch, check_launcher_family, mpirun_path
from hpcpipe.transport.long_wait import ABORT_AFTER_S
from hpcpipe.transport.members import Members, memory_of
from hpcpipe.transport.roll_call import RollCall, convene
from hpcpipe.transport.wait import Request, Waiter

THREAD_LEVELS = ("single", "funneled", "serialized", "multiple")
ABORTED_WITHIN_S = 5
"""Some libraries ask the launcher to end the job and wait for it, and the launcher may be out of reach."""
NEEDED_THREAD_LEVEL = "funneled"
"""Threads exist (torch, the checkpoint writer), but only the main thread calls MPI."""


class PersistentRequest(Request, Protocol):
    """A receive with a fixed buffer that can be started again and again."""

    def Start(self) -> None: ...

    def Cancel(self) -> None: ...

    def Free(self) -> None: ...


class World:
    """The job as one rank sees it.

    library: name and version of the MPI library, as "MPICH 5.0.2".
    standard: version of the MPI standard that it implements.
    thread_level: what MPI granted; one of `THREAD_LEVELS`.
    local_rank: number of lower ranks on the same host.
    hosts: host name of every rank.
    tag_limit: the largest tag of the library.
    memory_kinds: what the library says it can send from (MPI 4.1), or None.
    waiter: does every wait of the collectives; may be replaced.
    remarks: what a user should know about how this job is watched; one line each.
    """

    _roll_call: RollCall | None = None

    def __init__(self, communicator: Any, mpi: Any, waiter: Waiter | None = None) -> None:
        self._comm = communicator
        self._mpi = mpi
        self._buffer = memory_of(mpi)
        self.rank: int = communicator.Get_rank()
        self.size: int = communicator.Get_size()
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        self.remarks: list[str] = []
        self.waiter = waiter or Waiter(rank=self.rank)
        self.library = _library(mpi)
        self.standard = ".".join(str(part) for part in mpi.Get_version())
        self.thread_level = THREAD_LEVELS[self._level_index()]
        self.tag_limit: int = communicator.Get_attr(mpi.TAG_UB)
        self.memory_kinds: str | None = mpi.COMM_WORLD.Get_info().Get("mpi_memory_alloc_kinds")
        self.host: str = mpi.Get_processor_name()
        self.hosts: list[str] = self.all_gather_json(self.host, what="the host names of all ranks")
        self.local_rank = self.hosts[: self.rank].count(self.host)

    @classmethod
    def connect(
        cls,
        *,
        environment: Mapping[str, str] = os.environ,
        waiter: Waiter | None = None,
        watched: bool = True,
    ) -> World:
        """Initialise MPI and return the world. Every rank calls it once, from its main thread.

        watched: let ranks ask each other what they do in waits that last; the same on all ranks.

        `MPI4PY_RC_THREAD_LEVEL` overrides the thread level that is asked for.

        Raises LauncherError when there is no usable MPI library, or when ranks were started by the launcher
        of another.
        """
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = True
        try:
            with warnings.catch_warnings():
                # A launcher of another library is refused below, with its remedy.
                warnings.filterwarnings("ignore", "suspicious MPI execution environment", RuntimeWarning)
                from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise LauncherError(
                f"no usable MPI library ({' '.join(str(error).split())}): load the site's MPI module, or install "
                "one with pip install hpcpipe[mpich]"
            ) from error
        library = _library(MPI)
        if not MPI.Is_initialized():
            check_launcher_family(environment, library=library, mpirun=mpirun_path())
            wished = environment.get("MPI4PY_RC_THREAD_LEVEL", NEEDED_THREAD_LEVEL)
            if wished not in THREAD_LEVELS:
                raise LauncherError(f"MPI4PY_RC_THREAD_LEVEL={wished}: must be one of {', '.join(THREAD_LEVELS)}")
            with limited(ABORT_AFTER_S):
                MPI.Init_thread(getattr(MPI, f"THREAD_{wished.upper()}"))
        check_launch(environment, size=MPI.COMM_WORLD.Get_size(), library=library, mpirun=mpirun_path())
        communicator, request = MPI.COMM_WORLD.Idup()
        first = waiter or Waiter(rank=MPI.COMM_WORLD.Get_rank())
        first.wait([request], "the duplicate of the world communicator", kind="collective")
        communicator.Set_errhandler(MPI.ERRORS_RETURN)
        world = cls(communicator, MPI, waiter)
        if watched:
            world._roll_call, remark = convene(world)
            world.waiter = world._waiter
            world.remarks += [] if remark is None else [remark]
        return world

    @property
    def waiter(self) -> Waiter:
        """What does the waits of this rank."""
        return self._waiter

    @waiter.setter
    def waiter(self, waiter: Waiter) -> None:
        self._waiter = waiter
        if self._roll_call is not None:
            waiter.watch = self._roll_call
            self._roll_call.standing = waiter.standing

    def name_ranks(self, name: Callable[[int], str]) -> None:
        """Let messages about other ranks call them by `name`, as "rank 1 (stage 1)"."""
        if self._roll_call is not None:
            self._roll_call.name = name

    @property
    def notes(self) -> list[str]:
        """What a user should know about this MPI; one line each, usually none."""
        if THREAD_LEVELS.index(self.thread_level) >= THREAD_LEVELS.index(NEEDED_THREAD_LEVEL):
            return list(self.remarks)
        return [
            *self.remarks,
            f"{self.library} granted thread level {self.thread_level}, {NEEDED_THREAD_LEVEL} was needed: hpcpipe "
            "calls MPI from its main thread only, but the library does not promise to work beside other threads",
        ]

    @property
    def communicator(self) -> Any:
        """The duplicated mpi4py communicator, for measurements against raw MPI; channels use low tags on it."""
        return self._comm

    def isend(self, address: int, nbytes: int, rank: int, tag: int) -> Request:
        """Start sending `nbytes` bytes at `address`, which must stay as they are until the request is
        done."""
        request: Request = self._comm.Isend(self._buffer(address, nbytes), rank, tag)
        return request

    def irecv(self, address: int, nbytes: int, rank: int, tag: int) -> Request:
        """Start receiving up to `nbytes` bytes to `address`."""
        request: Request = self._comm.Irecv(self._buffer(address, nbytes), rank, tag)
        return request

    def recv_init(self, address: int, nbytes: int, rank: int, tag: int) -> PersistentRequest:
        """A receive of up to `nbytes` bytes to `address` that `Start` posts, as often as wanted."""
        request: PersistentRequest = self._comm.Recv_init(self._buffer(address, nbytes), rank, tag)
        return request

    def members(self, ranks: Sequence[int], *, tag: int) -> Members:
        """A communicator of `ranks`, in this order; each of them calls it, nobody else.

        MPI has no nonblocking call for it, so that whoever is missing hangs the others: see to it beforehand
        that all of them are about to call.

        tag: the same on all of them; apart from the tags of messages.
        """
        everybody = self._comm.Get_group()
        some = everybody.Incl(list(ranks))
        try:
            communicator = self._comm.Create_group(some, tag)
        finally:
            some.Free()
            everybody.Free()
        communicator.Set_errhandler(self._mpi.ERRORS_RETURN)
        return Members(communicator, self._mpi)

    def broadcast_json(self, value: Any, *, what: str) -> Any:
        """Rank 0's `value` on every rank. The others' `value` is ignored."""
        data = _encode(value) if self.rank == 0 else np.empty(0, np.uint8)
        length = np.array([data.size], np.int64)
        self._finish(self._comm.Ibcast(length, 0), what)
        if self.rank != 0:
            data = np.empty(int(length[0]), np.uint8)
        self._finish(self._comm.Ibcast(data, 0), what)
        return json.loads(data.tobytes())

    def all_gather_json(self, value: Any, *, what: str) -> list[Any]:
        """Everybody's `value`, by rank, on every rank."""
        mine = _encode(value)
        lengths = np.empty(self.size, np.int64)
        self._finish(self._comm.Iallgather(np.array([mine.size], np.int64), lengths), what)
        everything = np.empty(int(lengths.sum()), np.uint8)
        self._finish(self._comm.Iallgatherv(mine, [everything, lengths.tolist()]), what)
        return _decode(everything, lengths)

    def gather_json(self, value: Any, *, what: str) -> list[Any] | None:
        """Everybody's `value`, by rank, on rank 0; None on the others."""
        mine = _encode(value)
        lengths = np.empty(self.size, np.int64)
        self._finish(self._comm.Igather(np.array([mine.size], np.int64), lengths, 0), what)
        if self.rank != 0:
            self._finish(self._comm.Igatherv(mine, None, 0), what)
            return None
        everything = np.empty(int(lengths.sum()), np.uint8)
        self._finish(self._comm.Igatherv(mine, [everything, lengths.tolist()], 0), what)
        return _decode(everything, lengths)

    def all_reduce_sum(self, array: npt.NDArray[Any], *, what: str) -> npt.NDArray[Any]:
        """The sum of everybody's small array, added in the order of the ranks: the same bits on every rank.

        Raises TransportError when the ranks bring different dtypes or shapes.
        """
        mine = np.ascontiguousarray(array)
        forms = self.all_gather_json([mine.dtype.str, list(array.shape)], what=what)
        if any(form != forms[0] for form in forms):
            raise TransportError(f"{what}: the ranks bring different arrays: {forms}")
        everything = np.empty((self.size, *array.shape), mine.dtype)
        self._finish(
            self._comm.Iallgather([mine, self._mpi.BYTE], [everything, mine.nbytes, self._mpi.BYTE]), what
        )
        total = everything[0].copy()
        for part in everything[1:]:
            total = total + part
        return np.asarray(total, mine.dtype).reshape(array.shape)

    def barrier(self, what: str) -> None:
        """Return when every rank has come here."""
        self._finish(self._comm.Ibarrier(), what)

    def agree(self, error: Exception | None, *, what: str) -> None:
        """End together when any rank has failed: every rank calls it after work that may fail on some only.

        Returns when no rank brings an error. Otherwise the lowest rank that does raises its own, and every
        other rank raises FailedElsewhere, so that what all ranks find wrong is said once.
        """
        codes = self.all_gather_json(None if error is None else _exit_code(error), what=what)
        failed = [rank for rank, code in enumerate(codes) if code is not None]
        if not failed:
            return
        if error is not None and self.rank == failed[0]:
            raise error
        raise FailedElsewhere(failed[0], codes[failed[0]]) from error

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Run a block that may fail on some ranks only, then `agree`; the block must not communicate."""
        error: Exception | None = None
        try:
            with self.waiter.busy(what):
                yield
        except Exception as caught:
            error = caught
        self.agree(error, what=what)

    def farewell(self, code: int) -> None:
        """Tell the other ranks that this one ends the job with `code`: they will not take it for lost."""
        if self._roll_call is not None:
            self._roll_call.farewell(code)

    def abort(self, code: int) -> NoReturn:
        """End every rank of the job at once with `code`, whatever threads are alive."""
        self.farewell(code)
        with contextlib.suppress(ValueError):
            end_within(ABORTED_WITHIN_S)
        for stream in (sys.stdout, sys.stderr):
            # A stream that is closed, or in use by what a signal handler has interrupted, must not keep the job.
            with contextlib.suppress(OSError, ValueError, RuntimeError):
                stream.flush()
        if self.size > 1:
            self._mpi.COMM_WORLD.Abort(code)
        os._exit(code)

    def disconnect(self) -> None:
        """Finalise MPI; every rank calls it once, after its last message."""
        self.barrier("the end of all ranks")
        if not self._mpi.Is_finalized():
            with limited(self.waiter.abort_after_s):
                self._comm.Free()
                self._mpi.Finalize()

    def _finish(self, request: Request, what: str) -> None:
        self.waiter.wait([request], what, kind="collective", peers=self._others)

    def _level_index(self) -> int:
        levels = (
            self._mpi.THREAD_SINGLE,
            self._mpi.THREAD_FUNNELED,
            self._mpi.THREAD_SERIALIZED,
            self._mpi.THREAD_MULTIPLE,
        )
        return levels.index(self._mpi.Query_thread())


def _library(mpi: Any) -> str:
    name, version = mpi.get_vendor()
    return f"{name} {'.'.join(str(part) for part in version)}"


def _encode(value: Any) -> npt.NDArray[np.uint8]:
    return np.frombuffer(bytearray(json.dumps(value).encode()), np.uint8)


def _decode(data: npt.NDArray[np.uint8], lengths: npt.NDArray[np.int64]) -> list[Any]:
    return [json.loads(piece.tobytes()) for piece in np.split(data, np.cumsum(lengths)[:-1])]


def _exit_code(error: Exception) -> int:
    return error.exit_code if isinstance(error, HpcpipeError) else EXIT_FAILURE
