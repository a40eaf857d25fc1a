"""`hpcpipe doctor`: what this installation can do and what a run would use.

It works outside mpirun and on a login node. MPI is only initialised in a child process, and a missing or broken
part is a line in the answer, never an exception.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import click

from hpcpipe import __version__
from hpcpipe.errors import EXIT_FAILURE
from hpcpipe.transport.launcher import family_of, promises

PROBE_TIMEOUT_S = 60.0
EXCHANGE_TIMEOUT_S = 120.0

_NO_GPU = "not tried, no GPU here"
_NO_TOOLS = "not tried, it needs mpirun and CuPy"
_NOT_TRIED = (_NO_GPU, _NO_TOOLS)

Report = dict[str, Any]


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(as_json: bool) -> None:
    """Say what this installation can do and what it would use."""
    report = examine()
    if as_json:
        click.echo(json.dumps(report))
    else:
        for line in lines_of(report):
            click.echo(line)
    if "error" in report["mpi"]:
        sys.exit(EXIT_FAILURE)


def examine() -> Report:
    """Everything, as one JSON-able object; a part that could not be examined is `{"error": reason}`."""
    report: Report = {
        "hpcpipe": __version__,
        "python": platform.python_version(),
        "host": platform.node(),
        "torch": _guarded(_torch),
        "gpus": _guarded(_gpus),
        "cupy": _guarded(_cupy),
        "mpi": probe_mpi(),
        "mpirun": _guarded(_mpirun),
        "extension": _guarded(_extension),
        "h5py": _guarded(_h5py),
        "threads": _threads(),
    }
    if "error" not in report["mpi"]:
        report["mpirun"]["matches"] = _matches(report)
        report["mpi"]["device_exchange"] = _device_exchange(report)
    report["uses"] = _uses(report)
    return report


def probe_mpi() -> Report:
    """What `hpcpipe.transport.probe` says in a child process, or why it says nothing."""
    # Launcher variables of a surrounding job would make the child a rank of it.
    environment = {name: value for name, value in os.environ.items() if not _from_launcher(name)}
    return _run_probe([sys.executable, "-m", "hpcpipe.transport.probe"], environment, PROBE_TIMEOUT_S)


def lines_of(report: Report) -> list[str]:
    """The report for people: one line a part."""
    mpi, mpirun, h5py, torch = report["mpi"], report["mpirun"], report["h5py"], report["torch"]
    lines = [f"hpcpipe    {report['hpcpipe']}, Python {report['python']} on {report['host']}"]
    if "error" in mpi:
        lines.append(f"MPI        cannot be used: {mpi['error']}")
    else:
        lines.append(
            f"MPI        {mpi['library']} (MPI {mpi['standard']}), thread level {mpi['thread_level']}, tags up to "
            f"{mpi['tag_limit']}"
        )
        answer = "yes" if mpi["cuda_aware"] else "no"
        lines.append(f"CUDA-aware {answer}: {mpi['cuda_aware_how']}; device exchange: {mpi['device_exchange']}")
        lines += [f"note       {note}" for note in mpi["notes"]]
    if "error" in mpirun:
        lines.append(f"mpirun     {mpirun['error']}")
    else:
        match = {True: "matches the library", False: "does NOT match the library", None: "unknown match"}
        lines.append(f"mpirun     {mpirun['path']} ({mpirun['version']}): {match[mpirun.get('matches')]}")
    extension = report["extension"]
    lines.append(f"extension  {extension.get('error') or extension['reason'] or 'available'}")
    if "error" in h5py:
        lines.append(f"h5py       {h5py['error']}")
    else:
        files = "one file per rank, or one for all" if h5py["mpi"] else "one file per rank"
        parallel = f"with{'' if h5py['mpi'] else 'out'} MPI: {files}"
        lines.append(f"h5py       {h5py['version']}, HDF5 {h5py['hdf5']}, {parallel}")
    if "error" in torch:
        lines.append(f"torch      {torch['error']}")
    else:
        lines.append(f"torch      {torch['version']}, CUDA {torch['cuda'] or 'not built in'}")
    gpus = report["gpus"]
    lines.append(f"GPUs       {gpus.get('error') or ', '.join(gpus['names']) or 'none'}")
    lines.append(f"CuPy       {report['cupy'].get('error') or report['cupy']['version']}")
    threads = report["threads"]
    lines.append(
        f"threads    {threads['usable_cores']} usable cores, OMP_NUM_THREADS {threads['omp_num_threads']}"
    )
    return lines + [f"would use  {line}" for line in report["uses"]]


def _guarded(part: Callable[[], Report]) -> Report:
    try:
        return part()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}


def _torch() -> Report:
    import torch

    return {"version": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads()}


def _gpus() -> Report:
    import torch

    if not torch.cuda.is_available():
        return {"names": []}
    return {"names": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]}


def _cupy() -> Report:
    return {"version": importlib.import_module("cupy").__version__}


def _h5py() -> Report:
    import h5py

    # Debian's h5py is its parallel build under mpirun only.
    parallel = importlib.util.find_spec("h5py._debian_h5py_mpi") is not None
    return {
        "version": h5py.version.version,
        "hdf5": h5py.version.hdf5_version,
        "mpi": parallel or bool(h5py.get_config().mpi),
    }


def _extension() -> Report:
    reason = importlib.import_module("hpcpipe.optim.native").available()
    return {"available": reason is None, "reason": reason}


def _mpirun() -> Report:
    from hpcpipe.transport.launcher import mpirun_path

    path = mpirun_path()
    if path is None:
        return {"error": "none beside this Python and none on the PATH"}
    shown = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=False)
    text = [line.strip() for line in (shown.stdout + shown.stderr).splitlines() if line.strip()]
    version = next((line for line in text if line.startswith("Version")), text[0] if text else "no version")
    family = family_of(" ".join(text))
    return {"path": path, "version": " ".join(f"{text[0]} {version}".split()) if text else "", "family": family}


def _threads() -> Report:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "usable_cores": usable,
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS", "unset"),
    }


def _matches(report: Report) -> bool | None:
    family = family_of(report["mpi"]["library"])
    if "other" in (family, report["mpirun"].get("family", "other")):
        return None
    return bool(family == report["mpirun"]["family"])


def _device_exchange(report: Report) -> str:
    """The result of sending device memory between two ranks, in words."""
    if not report["gpus"].get("names"):
        return _NO_GPU
    if "path" not in report["mpirun"] or "error" in report["cupy"]:
        return _NO_TOOLS
    command = [report["mpirun"]["path"], "-n", "2", sys.executable, "-m", "hpcpipe.transport.probe", "exchange"]
    result = _run_probe(command, dict(os.environ), EXCHANGE_TIMEOUT_S)
    if "error" in result:
        return f"failed ({result['error']})"
    return "works" if result["exchanged"] else "delivers wrong bytes"


def _run_probe(command: list[str], environment: dict[str, str], timeout_s: float) -> Report:
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": " ".join(str(error).split())}
    for line in done.stdout.splitlines() if done.returncode == 0 else ():
        # Libraries and launchers may print lines of their own beside the answer.
        if line.startswith("{"):
            result: Report = json.loads(line)
            return result
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return {"error": f"exit code {done.returncode}: {said[0] if said else 'no output'}"}


def _uses(report: Report) -> list[str]:
    mpi, gpus = report["mpi"], report["gpus"].get("names")
    lines = []
    if "error" in mpi:
        lines.append("nothing yet: no rank can start without an MPI library (pip install hpcpipe[mpich])")
    elif not gpus:
        lines.append(f"the CPU, messages straight from host memory over {mpi['library']}")
    elif mpi["cuda_aware"] and mpi["device_exchange"] not in ("works", *_NOT_TRIED):
        lines.append(f"{len(gpus)} GPU(s), but {mpi['library']} fails with device memory: say cuda_aware = 'off'")
    elif mpi["cuda_aware"]:
        lines.append(f"{len(gpus)} GPU(s), device memory given to {mpi['library']}")
    else:
        lines.append(f"{len(gpus)} GPU(s), messages staged through pinned host memory over {mpi['library']}")
    native = report["extension"].get("available", False)
    lines.append("the native update" if native else "the plain torch update")
    lines.append("one HDF5 file per rank" if "error" not in report["h5py"] else "no checkpoints: h5py is missing")
    stated = promises(os.environ)
    if stated:
        lines.append(f"{stated[0].ranks} ranks, as {stated[0].variable} says")
    return lines


def _from_launcher(name: str) -> bool:
    return name.startswith(
        ("PMI_", "PMIX_", "OMPI_COMM_", "OMPI_MCA_orte", "PRTE_", "SLURM_", "MPI_LOCAL", "HYDI_")
    )
