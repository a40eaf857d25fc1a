"""`hpcpipe job`: write the script that a batch system runs, and say what it takes for granted. Submits nothing."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcpipe.batch.durations import parse_duration
from hpcpipe.batch.indices import parse_indices
from hpcpipe.batch.request import LAUNCHERS, SCHEDULERS, JobRequest
from hpcpipe.errors import JobError

if TYPE_CHECKING:
    # pydantic comes with it; --help needs none.
    from hpcpipe.config import RunConfig

LEAD_S = 300
"""How long before the limit a job is asked to stop, or a tenth of the limit where that is less."""
_PLUGINS = {"mpich": "pmi2", "openmpi": "pmix", "cray": "cray_shasta", "other": None}
_ASK_S = 10.0


@click.command()
@click.argument("run_file", metavar="RUN.toml", type=click.Path())
@click.option("--scheduler", type=click.Choice(SCHEDULERS), required=True, help="none: plain mpirun.")
@click.option("--nodes", metavar="N", type=click.IntRange(1), default=1, show_default=True)
@click.option("--ranks-per-node", metavar="N", type=click.IntRange(1), required=True, help="Usually one a GPU.")
@click.option("--time", metavar="H:MM:SS", help="Limit of the job, as 4:00:00, 1-12:00:00 or 90min.")
@click.option("-o", "--output", metavar="FILE", type=click.Path(), help="[default: standard output]")
@click.option("--force", is_flag=True, help="Write over FILE.")
@click.option("--launcher", type=click.Choice(LAUNCHERS), help="[default: srun under Slurm, else mpirun]")
@click.option(
    "--mpi", metavar="PLUGIN", help="srun --mpi: pmi2, pmix, cray_shasta.  [default: by the MPI library]"
)
@click.option("--cpus-per-task", metavar="N", type=click.IntRange(1), help="[default: run.threads, or 1]")
@click.option("--gpus-per-node", metavar="N", type=click.IntRange(1), help="[default: none]")
@click.option("--partition", "--queue", "queue", metavar="NAME", help="[default: the site's]")
@click.option("--account", metavar="NAME", help="Account, or LSF's project.")
@click.option("--qos", metavar="NAME", help="Quality of service, or LSF's service class.")
@click.option("--directive", "directives", metavar="TEXT", multiple=True, help="One more option, as --exclusive.")
@click.option("--array", metavar="LIST", help="A job array over seeds, as 0-4 or 1,2,5%2.")
@click.option("--max-requeues", metavar="N", type=click.IntRange(0), default=10, show_default=True)
@click.option(
    "--signal-before",
    metavar="TIME",
    help="From the request to stop to the limit.  [default: 300s, or a tenth of --time]",
)
@click.option("--setup", metavar="LINE", multiple=True, help="Run first, as 'module load ...'; repeat for more.")
@click.option("--out", metavar="DIR", help="Folder of the run.  [default: run.out and the job's number]")
@click.option("--name", metavar="NAME", help="[default: the run file's]")
@click.option(
    "--hostfile", metavar="FILE", default="hosts.txt", show_default=True, help="Of several nodes with none."
)
@click.option("--set", "overrides", metavar="a.b=VALUE", multiple=True, help="Override a value of the run file.")
def job(
    run_file: str,
    scheduler: str,
    nodes: int,
    ranks_per_node: int,
    time: str | None,
    output: str | None,
    force: bool,
    launcher: str | None,
    mpi: str | None,
    cpus_per_task: int | None,
    gpus_per_node: int | None,
    queue: str | None,
    account: str | None,
    qos: str | None,
    directives: tuple[str, ...],
    array: str | None,
    max_requeues: int,
    signal_before: str | None,
    setup: tuple[str, ...],
    out: str | None,
    name: str | None,
    hostfile: str,
    overrides: tuple[str, ...],
) -> None:
    """Write a script that trains RUN.toml under a batch system, over as many jobs as it takes.

    What the script takes for granted is said on standard error. Nothing is submitted.
    """
    from hpcpipe.batch import write_script
    from hpcpipe.batch.assumptions import assumptions
    from hpcpipe.config import load_run
    from hpcpipe.transport.installed import find_mpi
    from hpcpipe.transport.launcher import mpirun_path

    config = load_run(run_file, overrides)
    replicas, use = _use_of_ranks(config, run_file, nodes * ranks_per_node)
    _check_device(config, run_file, scheduler, gpus_per_node)
    limit = None if time is None else parse_duration(time, "--time")
    found = find_mpi(os.environ)
    launcher = launcher or ("srun" if scheduler == "slurm" else "mpirun")
    plugin = (mpi or _PLUGINS[found.family]) if launcher == "srun" else None
    request = JobRequest(
        command=_this_command(),
        run_file=run_file,
        name=name or _name_of(run_file),
        scheduler=scheduler,
        launcher=launcher,
        family=found.family,
        mpirun="mpiexec" if found.family == "cray" else (mpirun_path() or "mpirun"),
        mpi=plugin,
        netmod="ofi" if found.package == "mpich" and plugin == "pmi2" else None,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        cpus_per_rank=cpus_per_task or config.run.threads or 1,
        gpus_per_node=gpus_per_node,
        time_s=limit,
        signal=_signal(config, launcher),
        signal_before_s=_lead(signal_before, limit),
        max_requeues=max_requeues,
        out=out or config.run.out,
        # A folder that is named is meant.
        out_by_job=out is None and scheduler != "none",
        indices=None if array is None else parse_indices(array),
        overrides=overrides,
        directory=os.getcwd(),
        script=None if output is None else os.path.abspath(output),
        hostfile=hostfile,
        setup=setup,
        queue=queue,
        account=account,
        qos=qos,
        directives=directives,
    )
    _write(write_script(request, file=output), output, force)
    bound = 2 * request.ranks + math.lcm(*replicas)
    library = f"{found.name} ({found.how})"
    lines = assumptions(request, ranks=use, library=library, stop_bound=bound, file=output)
    for line in [*lines, *_doubts(plugin)]:
        click.echo(f"hpcpipe: {line}", err=True)


def _use_of_ranks(config: RunConfig, run_file: str, ranks: int) -> tuple[tuple[int, ...], str]:
    """Replicas of each stage and what the ranks are for, as far as the run file decides it.

    Raises JobError: it is for another number of ranks.
    """
    pipeline = config.pipeline
    if pipeline.plan is not None and pipeline.plan != "auto":
        from hpcpipe.planning.plan_file import load_plan

        replicas, source = load_plan(pipeline.plan).replicas, f"the plan {pipeline.plan}"
    elif pipeline.plan == "auto":
        return (1,), 'pipeline.plan = "auto" will decide at the start what they do'
    elif pipeline.replicas is not None:
        replicas, source = pipeline.replicas, f"pipeline.replicas = {list(pipeline.replicas)} of {run_file}"
    else:
        named = pipeline.stages if isinstance(pipeline.balance, str) else len(pipeline.balance)
        key = "pipeline.stages" if isinstance(pipeline.balance, str) else "pipeline.balance"
        if named is None or named == ranks:
            return (1,), f"one stage each, of which {run_file} must have as many layers"
        if named > ranks and pipeline.stages is not None:
            return (1,), f"they share {named} stages"
        raise JobError(
            f"{run_file}: {key} makes {named} stages, but --nodes and --ranks-per-node make {ranks} ranks: ask "
            f"for {named} ranks, or change it"
        )
    if sum(replicas) != ranks:
        raise JobError(
            f"{source} is for {sum(replicas)} ranks, but --nodes and --ranks-per-node make {ranks}: ask for "
            f"{sum(replicas)}, or change it"
        )
    return replicas, f"stages of {'-'.join(map(str, replicas))} replicas, by {source}"


def _check_device(config: RunConfig, run_file: str, scheduler: str, gpus: int | None) -> None:
    if config.run.device == "cuda" and gpus is None and scheduler != "none":
        raise JobError(f'{run_file}: run.device = "cuda", so the job needs --gpus-per-node, or another device')


def _signal(config: RunConfig, launcher: str) -> str:
    """The first of run.stop_signals that is a warning and nothing else; SIGTERM also ends jobs."""
    names = [name.removeprefix("SIG") for name in config.run.stop_signals]
    if not names:
        raise JobError("run.stop_signals: is empty, so no signal could stop the job in time; name SIGUSR1")
    return "USR1" if "USR1" in names else names[0]


def _lead(given: str | None, limit: int | None) -> int:
    if given is not None:
        return parse_duration(f"{given}s" if given.isdecimal() else given, "--signal-before")
    return LEAD_S if limit is None else min(LEAD_S, max(1, limit // 10))


def _this_command() -> tuple[str, ...]:
    """How this installation's command is called on a node whose PATH lacks it."""
    script = Path(sysconfig.get_path("scripts")) / "hpcpipe"
    return (str(script),) if os.access(script, os.X_OK) else (sys.executable, "-m", "hpcpipe")


def _name_of(run_file: str) -> str:
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(run_file).stem)
    return name if name[:1].isalpha() else f"run-{name}"


def _write(text: str, output: str | None, force: bool) -> None:
    if output is None:
        click.echo(text, nl=False)
        return
    path = Path(output)
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
        # Executable by whoever may read it.
        path.chmod(path.stat().st_mode | (path.stat().st_mode & 0o444) >> 2)
    except FileExistsError:
        raise JobError(f"{output}: is there already; choose another name, or write over it with --force") from None
    except OSError as error:
        raise JobError(f"{output}: cannot be written: {error.strerror}") from None


def _doubts(plugin: str | None) -> list[str]:
    """A line if this machine's Slurm says that it lacks the plugin."""
    srun = shutil.which("srun")
    if plugin is None or srun is None:
        return []
    try:
        shown = subprocess.run(
            [srun, "--mpi=list"],
            capture_output=True,
            text=True,
            timeout=_ASK_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    # Each on a line of its own, or after a heading on one line; with pmix_v4 there is pmix, too.
    offered = re.findall(r"[a-z]\w*", shown.stdout + shown.stderr)
    if shown.returncode or plugin in offered:
        return []
    return [f"Slurm does not list {plugin} here (srun --mpi=list): choose another with --mpi"]
