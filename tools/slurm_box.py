#!/usr/bin/env python3
"""A real Slurm on one Linux machine: its own controller, its own munge, and nodes n0, n1, … that share the cores.

    tools/slurm_box.py run -- bash -c 'sbatch --wait job.sbatch'

starts a cluster, runs the command on it and stops the cluster, whatever happened; it ends with the command's exit
code. For a cluster that stays:

    tools/slurm_box.py start --dir /tmp/box && eval "$(tools/slurm_box.py env --dir /tmp/box)"
    sbatch job.sbatch; squeue
    tools/slurm_box.py stop --dir /tmp/box

Everything it needs and writes is in one folder, its ports are free ones, and a Slurm or munge of the system is
neither needed nor touched, so several boxes may stand at once. Needs Debian's slurm-wlm and munge, or a site's
packages of both. It behaves like any Slurm but for being quick: a requeued job waits 5 s, not two minutes, and
KillWait is 10 s.
"""

from __future__ import annotations

import getpass
import os
import random
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import click

PROGRAMS = {
    "munged": "munge",
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sinfo": "slurm-wlm",
    "squeue": "slurm-wlm",
    "scancel": "slurm-wlm",
}
# Where daemons live, which a user's PATH may lack.
SYSTEM_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
# Below the ports that systems hand out by themselves, so that nobody is given one between its choice and its use.
PORTS = range(18000, 32000)
# The longest name of a socket is 107 bytes, and a job step's has the node, job and step in it.
LONGEST_FOLDER = 60
MARK = "HPCPIPE_SLURM_BOX"
START_LIMIT_S = 60.0
CANCEL_LIMIT_S = 2.0
END_LIMIT_S = 10.0
KILL_WAIT_S = 10
REQUEUE_WAIT_S = 5
LOG_LINES = 8

REMADE = ("state", "spool", "pids", "munge")
FIRST_LINE = "# Made by slurm_box: what is changed here is lost at its next start.\n"

CONFIGURATION = """\
ClusterName=box
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
# cred_expire is also the time that a requeued job waits.
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire={requeue_wait}
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/pids/slurmctld
SlurmdPidFile={folder}/pids/slurmd-%n
SlurmctldLogFile={folder}/log/slurmctld
SlurmdLogFile={folder}/log/slurmd-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MailProg=/bin/true
MpiDefault=pmi2
# A node that somebody set down stays so, one that did not answer comes back by itself.
ReturnToService=1
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# Jobs start at once, and ended ones can be asked about for an hour.
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
MinJobAge=3600
CompleteWait=0
KillWait={kill_wait}
JobRequeue=1
# A machine with more to do than it can must not look like a dead one.
MessageTimeout=60
BatchStartTimeout=60
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port={node_ports} CPUs={cpus} RealMemory={memory}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Refused(click.ClickException):
    """Something that the user can mend: one line, exit code 2."""

    exit_code = 2


@dataclass(frozen=True)
class Box:
    """The cluster whose configuration, state, logs and sockets are in `folder`."""

    folder: Path

    @property
    def configuration(self) -> Path:
        return self.folder / "slurm.conf"

    @property
    def environment(self) -> dict[str, str]:
        """What a Slurm command needs to find this cluster."""
        return {"SLURM_CONF": str(self.configuration)}

    def pid_files(self) -> list[Path]:
        """The daemons' pid files, those that depend on others first."""
        pids = self.folder / "pids"
        return [*sorted(pids.glob("slurmd-*")), pids / "slurmctld", pids / "munged"]


def range_of(first: int, count: int) -> str:
    """`first` alone, or `[first-last]` as Slurm writes a range."""
    return str(first) if count == 1 else f"[{first}-{first + count - 1}]"


def rendered(
    folder: Path, *, nodes: int, cpus: int, controller_port: int, first_node_port: int, memory_mb: int
) -> str:
    """The text of slurm.conf."""
    return FIRST_LINE + CONFIGURATION.format(
        folder=folder,
        host=socket.gethostname().partition(".")[0],
        user=getpass.getuser(),
        controller_port=controller_port,
        nodes=f"n{range_of(0, nodes)}",
        node_ports=range_of(first_node_port, nodes),
        cpus=cpus,
        memory=memory_mb,
        kill_wait=KILL_WAIT_S,
        requeue_wait=REQUEUE_WAIT_S,
    )


def is_free(port: int) -> bool:
    """Whether nobody listens on this TCP port of any address."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            probe.bind(("", port))
            return True
    return False


def free_ports(count: int, free: Callable[[int], bool] = is_free) -> int:
    """The first of `count` free ports in a row, looked for from a random place on. Raises Refused."""
    starts = list(PORTS[: -count + 1 or None])
    turn = random.SystemRandom().randrange(len(starts))
    for first in starts[turn:] + starts[:turn]:
        if all(free(port) for port in range(first, first + count)):
            return first
    raise Refused(f"no {count} free ports in a row between {PORTS.start} and {PORTS.stop - 1}")


def find_programs() -> dict[str, str]:
    """Full paths of Slurm's and munge's programs. Raises Refused naming what to install."""
    found = {name: shutil.which(name, path=SYSTEM_PATH) for name in PROGRAMS}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        packages = dict.fromkeys(PROGRAMS[name] for name in missing)
        raise Refused(f"{', '.join(missing)}: not found; install {' and '.join(packages)} (Debian's names)")
    return {name: path for name, path in found.items() if path is not None}


def processes_of(box: Box) -> dict[int, str]:
    """All living processes of this cluster, daemons, job steps and tasks of jobs, by process id."""
    mark = f"{MARK}={box.folder}".encode()
    conf = f"SLURM_CONF={box.configuration}".encode()
    found = {}
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        place = Path(f"/proc/{pid}")
        # Processes end, and those of other users cannot be looked into.
        with suppress(OSError):
            variables = (place / "environ").read_bytes().split(b"\0")
            in_job = conf in variables and any(entry.startswith(b"SLURM_JOB_ID=") for entry in variables)
            if mark in variables or in_job:
                words = (place / "cmdline").read_bytes().replace(b"\0", b" ")
                found[pid] = words.decode(errors="replace").strip()
    return {pid: words for pid, words in found.items() if pid != os.getpid()}


def with_descendants(pids: Iterable[int]) -> set[int]:
    """These processes and all living ones below them, children of any of their threads."""
    found = set(pids)
    waiting = list(found)
    while waiting:
        threads = Path(f"/proc/{waiting.pop()}/task")
        # Processes and threads end while they are looked at.
        with suppress(OSError):
            for thread in os.listdir(threads):
                children = set(map(int, (threads / thread / "children").read_text().split())) - found
                found |= children
                waiting += children
    return found


def start(box: Box, *, nodes: int, cpus: int) -> None:
    """Start the cluster and wait until every node is idle.

    Raises click.ClickException: programs are missing, the folder will not do, a box stands there, or a daemon or
    node does not come up; nothing is left running then.
    """
    programs = find_programs()
    check_folder(box)
    prepare(box, nodes, cpus)
    try:
        launch(box, programs, nodes)
        wait_until_idle(box, programs, nodes)
    except BaseException:
        stop(box)
        raise


def check_folder(box: Box) -> None:
    """Refuse a folder in which no box can stand, or that holds what is not a box's."""
    folder = box.folder
    if len(str(folder)) > LONGEST_FOLDER:
        raise Refused(f"{folder}: too long for sockets in it; give a --dir of at most {LONGEST_FOLDER} characters")
    if re.search(r"[^\w./+-]", str(folder)):
        raise Refused(
            f"{folder}: Slurm would not read such a name as it is meant; give a --dir of letters and digits"
        )
    if processes_of(box):
        raise Refused(f"a Slurm box stands in {folder} already: stop it first, or give another --dir")
    if folder.exists() and folder.stat().st_uid != os.getuid():
        raise Refused(f"{folder}: belongs to another user; give another --dir")
    taken = [name for name in (*REMADE, "log", box.configuration.name) if (folder / name).exists()]
    if taken and not (box.configuration.exists() and box.configuration.read_text().startswith(FIRST_LINE)):
        raise Refused(f"{folder}: has a {taken[0]} that is not a box's; give another --dir")


def prepare(box: Box, nodes: int, cpus: int) -> None:
    """Make the folder anew, with configuration and key; logs of an earlier box are kept."""
    for name in REMADE:
        shutil.rmtree(box.folder / name, ignore_errors=True)
    for name in (*REMADE, "log", *(f"spool/n{node}" for node in range(nodes))):
        (box.folder / name).mkdir(parents=True, exist_ok=True)
    key = box.folder / "munge" / "key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    port = free_ports(nodes + 1)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    box.configuration.write_text(
        rendered(
            box.folder, nodes=nodes, cpus=cpus, controller_port=port, first_node_port=port + 1, memory_mb=memory
        )
    )


def launch(box: Box, programs: Mapping[str, str], nodes: int) -> None:
    """Start all daemons, which go into the background by themselves."""
    munge = box.folder / "munge"
    lines = [
        [
            programs["munged"],
            # The way to the socket need not be open to other users.
            "--force",
            f"--socket={munge}/socket",
            f"--key-file={munge}/key",
            f"--seed-file={munge}/seed",
            f"--pid-file={box.folder}/pids/munged",
            f"--log-file={box.folder}/log/munged",
        ],
        [programs["slurmctld"], "-f", str(box.configuration)],
        *([programs["slurmd"], "-f", str(box.configuration), "-N", f"n{node}"] for node in range(nodes)),
    ]
    for line in lines:
        output = box.folder / "log" / "start"
        with output.open("a") as stream:
            done = subprocess.run(
                line,
                env={**os.environ, **box.environment, MARK: str(box.folder)},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                check=False,
            )
        if done.returncode:
            raise click.ClickException(f"{Path(line[0]).name} did not start ({done.returncode})\n{tails(box)}")


def wait_until_idle(box: Box, programs: Mapping[str, str], nodes: int) -> None:
    """Wait for the nodes. Raises click.ClickException with the ends of the logs when they take too long."""
    deadline = time.monotonic() + START_LIMIT_S
    states: list[str] = []
    while time.monotonic() < deadline:
        asked = slurm(box, programs["sinfo"], "--noheader", "--Node", "--format=%N=%T")
        states = asked.stdout.split() or [asked.stderr.strip()]
        if states == [f"n{node}=idle" for node in range(nodes)]:
            return
        time.sleep(0.1)
    raise click.ClickException(
        f"the nodes were not idle after {START_LIMIT_S:g} s: {' '.join(states)}\n{tails(box)}"
    )


def slurm(box: Box, *words: str) -> subprocess.CompletedProcess[str]:
    """Run one Slurm command on the box; its exit code is 124 if nobody answers it."""
    # `timeout` and not subprocess's: a command that waits for its controller must not keep the box from ending.
    line = ["timeout", f"{END_LIMIT_S:g}", *words]
    return subprocess.run(line, env={**os.environ, **box.environment}, capture_output=True, text=True, check=False)


def tails(box: Box) -> str:
    """The last lines of every log that has any."""
    parts = []
    for log in sorted((box.folder / "log").iterdir()):
        lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        if lines:
            parts.append("\n".join([f"--- {log}", *lines]))
    return "\n".join(parts)


def stop(box: Box) -> None:
    """End the cluster and every job on it. Raises click.ClickException if a process is still there after that."""
    daemons = [pid for file in box.pid_files() if (pid := running(box, file)) is not None]
    answers = running(box, box.folder / "pids" / "slurmctld") is not None
    if answers:
        cancel_jobs(box)
    # A job that does not obey is killed with all below it. Daemons that know of its end need not wait for it.
    kill(with_descendants(processes_of(box)) - with_descendants(daemons) - {os.getpid()})
    if answers:
        wait_for_jobs(box)
    for pid in daemons:
        end_daemon(box, pid)
    kill(processes_of(box))
    if not comes_true(lambda: not processes_of(box), END_LIMIT_S):
        left = "; ".join(f"{pid}: {words}" for pid, words in processes_of(box).items())
        raise click.ClickException(f"could not end all processes of {box.folder}: {left}")


def running(box: Box, pid_file: Path) -> int | None:
    """The daemon whose id is in `pid_file`; None if it has ended, even if its id went to another process since."""
    with suppress(OSError, ValueError):
        pid = int(pid_file.read_text())
        return pid if pid in processes_of(box) else None
    return None


def cancel_jobs(box: Box) -> None:
    """Ask all jobs to end and give them a moment to do so."""
    slurm(box, find_programs()["scancel"], f"--user={getpass.getuser()}")
    wait_for_jobs(box)


def wait_for_jobs(box: Box) -> None:
    """Wait for the end of all jobs, but not long."""
    question = (find_programs()["squeue"], "--noheader", "--format=%A")
    comes_true(lambda: not slurm(box, *question).stdout.strip(), CANCEL_LIMIT_S)


def end_daemon(box: Box, pid: int) -> None:
    """Ask a daemon to end, and kill it if it does not."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    if not comes_true(lambda: pid not in processes_of(box), END_LIMIT_S):
        kill([pid])


def kill(pids: Iterable[int]) -> None:
    """End processes at once, those that are still there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def comes_true(question: Callable[[], bool], limit_s: float) -> bool:
    """Whether the answer becomes yes within a time."""
    deadline = time.monotonic() + limit_s
    while not question():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@contextmanager
def standing(folder: Path | None = None, *, nodes: int = 2, cpus: int | None = None) -> Iterator[Box]:
    """A box for as long as the block runs, in a folder that is removed behind it unless one is given."""
    made = Path(tempfile.mkdtemp(prefix="slurm_box-")) if folder is None else folder
    box = Box(made.resolve())
    try:
        start(box, nodes=nodes, cpus=cpus or cpus_of_a_node())
        try:
            yield box
        finally:
            stop(box)
    finally:
        if folder is None:
            shutil.rmtree(made, ignore_errors=True)


def cpus_of_a_node() -> int:
    return max(4, os.cpu_count() or 1)


def run_on(box: Box, words: Sequence[str]) -> int:
    """Run a command with the box as its Slurm; its exit code, as a shell would give it."""
    try:
        process = subprocess.Popen(words, env={**os.environ, **box.environment})
    except OSError as error:
        raise Refused(f"{words[0]}: {error.strerror}") from error
    try:
        code = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    return code if code >= 0 else 128 - code


def default_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"slurm_box-{os.getuid()}"


def leave_on_sigterm(number: int, frame: object) -> None:
    """As after an exception, so that what was started is stopped."""
    sys.exit(128 + number)


DIR = click.option(
    "--dir",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    metavar="DIR",
    help=f"Folder of the box; {default_folder()} when left out.",
)
NODES = click.option(
    "--nodes", default=2, show_default=True, type=click.IntRange(1, 64), help="Number of nodes: n0, n1, and so on."
)
CPUS = click.option(
    "--cpus", default=None, type=click.IntRange(1), help="CPUs that each node claims; at least 4 when left out."
)


@click.group()
def main() -> None:
    """A real Slurm on this machine."""
    signal.signal(signal.SIGTERM, leave_on_sigterm)


@main.command("start")
@DIR
@NODES
@CPUS
def start_command(folder: Path | None, nodes: int, cpus: int | None) -> None:
    """Start a Slurm that stays until `stop`."""
    box = Box((folder or default_folder()).resolve())
    start(box, nodes=nodes, cpus=cpus or cpus_of_a_node())
    click.echo(f"Slurm with {nodes} nodes in {box.folder}")


@main.command("stop")
@DIR
def stop_command(folder: Path | None) -> None:
    """End a Slurm and every job on it; its logs stay."""
    box = Box((folder or default_folder()).resolve())
    stood = bool(processes_of(box))
    stop(box)
    click.echo(f"{'stopped' if stood else 'there was'} {'the' if stood else 'no'} Slurm in {box.folder}")


@main.command("env")
@DIR
def env_command(folder: Path | None) -> None:
    """Print what a shell must export to use the box."""
    box = Box((folder or default_folder()).resolve())
    if not processes_of(box):
        raise Refused(f"no Slurm box stands in {box.folder}: start one first")
    for name, value in box.environment.items():
        click.echo(f"export {name}={shlex.quote(value)}")


@main.command("run", context_settings={"ignore_unknown_options": True})
@DIR
@NODES
@CPUS
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED)
def run_command(folder: Path | None, nodes: int, cpus: int | None, words: tuple[str, ...]) -> None:
    """Run a command on a Slurm that stands just for it."""
    with standing(folder, nodes=nodes, cpus=cpus) as box:
        code = run_on(box, words)
    sys.exit(code)


if __name__ == "__main__":
    main()
