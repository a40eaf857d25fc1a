"""Who holds the folder of a run, and whether that process can still be there.

What a process says of itself must tell it from every other one: host names and process ids repeat, on other hosts,
in containers and after a reboot, so the kernel's boot, the pid namespace and the process's start go with them.
"""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from enum import Enum
from pathlib import Path

from hpcpipe.untrusted import parse_json

_FORMAT = "hpcpipe run lock"
_JOBS = (("Slurm", "SLURM_JOB_ID"), ("PBS", "PBS_JOBID"), ("LSF", "LSB_JOBID"))
_LONGEST = 256
_LARGEST = 1e11
_DEAD = ("Z", "X", "x")
"""States of a process that has ended and whose parent has not looked yet."""


class Fate(Enum):
    """What is known of a holder without looking at its heartbeat."""

    GONE = "gone"
    ALIVE = "alive"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Holder:
    """One process that holds a folder.

    `token` is unique to each lock, `run` the id of the run if it has one already. `boot` and `namespace` tell
    machines and containers of one name apart; `started` is when the process began, in clock ticks since the boot.
    `job` is the scheduler's, `restarts` how often that has requeued it. `since` (Unix time) is for people only.
    """

    run: str | None
    token: str
    host: str
    boot: str | None
    namespace: str | None
    pid: int
    started: int | None
    job: str | None
    restarts: int
    since: float

    @classmethod
    def here(cls, run: str | None, environment: Mapping[str, str] = os.environ) -> Holder:
        """This process, with a token of its own."""
        pid = os.getpid()
        state = _state_of(pid)
        return cls(
            run=run,
            token=secrets.token_hex(8),
            host=platform.node(),
            boot=_boot(),
            namespace=_namespace(),
            pid=pid,
            started=None if state is None else state[1],
            job=next((f"{name} job {environment[key]}" for name, key in _JOBS if environment.get(key)), None),
            restarts=_count(environment.get("SLURM_RESTART_COUNT")),
            since=time.time(),
        )

    def encode(self) -> bytes:
        """The content of a lock file."""
        return (json.dumps({"format": _FORMAT, **asdict(self)}) + "\n").encode()

    @classmethod
    def decode(cls, data: bytes) -> Holder | None:
        """Whom the content of a lock file names; None if it is not (or not yet) one."""
        try:
            document = parse_json(data)
        except ValueError:
            return None
        if not isinstance(document, dict) or document.pop("format", None) != _FORMAT:
            return None
        kinds = {
            "pid": (int,),
            "restarts": (int,),
            "since": (int, float),
            "started": (int, type(None)),
            **dict.fromkeys(("run", "boot", "namespace", "job"), (str, type(None))),
        }
        known = {field.name: kinds.get(field.name, (str,)) for field in fields(cls)}
        if document.keys() != known.keys():
            return None
        if not all(isinstance(document[name], kind) and _is_plain(document[name]) for name, kind in known.items()):
            return None
        return cls(**document)

    def fate_of(self, other: Holder) -> Fate:
        """What this process knows of another holder."""
        mine = (self.host, self.boot, self.namespace)
        if None not in mine and mine == (other.host, other.boot, other.namespace):
            return _fate(other.pid, other.started)
        if self.job is not None and self.job == other.job and self.restarts > other.restarts:
            # The scheduler starts a job again when it has ended it.
            return Fate.GONE
        return Fate.UNKNOWN

    def __str__(self) -> str:
        """In words: process and host."""
        return f"process {self.pid} on {self.host}"


def _is_plain(value: object) -> bool:
    """Whether a value can stand in a message, and a number be that of a process."""
    if isinstance(value, str):
        return len(value) <= _LONGEST and value.isprintable()
    return not isinstance(value, (int, float)) or 0 <= value < _LARGEST


def _fate(pid: int, started: int | None) -> Fate:
    """Whether the process of this machine that has `pid` and began at `started` is there."""
    # Signal 0 is only looked up. Of another user's process /proc may hide what it is, so it is asked second.
    try:
        with suppress(PermissionError):
            os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return Fate.GONE
    state = _state_of(pid)
    if state is None or started is None:
        return Fate.UNKNOWN
    return Fate.GONE if state[0] in _DEAD or state[1] != started else Fate.ALIVE


def _state_of(pid: int) -> tuple[str, int] | None:
    """State and start (clock ticks since the boot) of a process; None where /proc does not tell."""
    try:
        # The command in parentheses may itself hold spaces and parentheses.
        values = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return values[0], int(values[19])
    except (OSError, IndexError, ValueError):
        return None


def _boot() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _namespace() -> str | None:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def _count(text: str | None) -> int:
    return int(text) if text is not None and re.fullmatch(r"\d{1,9}", text) else 0
