"""Which MPI library a job will use, found without loading one: a login node often has none that works.

The order is mpi4py's own: a library that pip put beside this Python comes first, MPICH before Open MPI, and then
what the site has loaded, which its mpirun betrays.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

from hpcpipe.transport.launcher import family_of, mpirun_path

_PACKAGES = (("mpich", "MPICH", "mpich"), ("openmpi", "Open MPI", "openmpi"), ("impi-rt", "Intel MPI", "mpich"))
_LOOK_S = 30.0


@dataclass(frozen=True, kw_only=True)
class InstalledMpi:
    """`family`: mpich, openmpi, cray or other. `name` for people, `how` it was found, pip's `package` if any."""

    family: str
    name: str
    how: str
    package: str | None = None


def find_mpi(environment: Mapping[str, str]) -> InstalledMpi:
    """The library that a job started from here will most likely use; of family `other` if nothing tells."""
    for package, name, family in _PACKAGES:
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        how = f"package {package} of this Python"
        return InstalledMpi(family=family, name=f"{name} {version}", how=how, package=package)
    if cray := environment.get("CRAY_MPICH_VERSION"):
        return InstalledMpi(family="cray", name=f"Cray MPICH {cray}", how="CRAY_MPICH_VERSION is set")
    path = mpirun_path()
    said = "" if path is None else version_of(path)
    family = family_of(said)
    if family == "other":
        how = "there is no mpirun" if path is None else f"{path} does not say whose it is"
        return InstalledMpi(family=family, name="an MPI library of unknown kind", how=how)
    name = {"mpich": "MPICH or a relative", "openmpi": "Open MPI"}[family]
    return InstalledMpi(family=family, name=name, how=f"{path} --version")


def version_of(mpirun: str) -> str:
    """What `mpirun --version` prints; nothing if it cannot be asked."""
    try:
        shown = subprocess.run(
            [mpirun, "--version"],
            capture_output=True,
            text=True,
            timeout=_LOOK_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return shown.stdout + shown.stderr
