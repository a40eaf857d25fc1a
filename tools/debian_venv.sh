#!/usr/bin/env bash
# Makes a virtual environment on top of Debian's Python, with Debian's parallel h5py and Open MPI and, beside them,
# torch and the rest of what hpcpipe needs. hpcpipe itself is used from this checkout.
#
#   bash tools/debian_venv.sh [FOLDER]      default: build/debian; used again while it is current
#
# It wants these packages: python3-h5py-mpi python3-mpi4py openmpi-bin python3-venv. Afterwards:
#
#   PYTHONPATH=$PWD mpirun.openmpi -n 4 build/debian/bin/python -m hpcpipe train jobs/digits-mlp.toml \
#       --set 'checkpoint.file="shared"'
#
#   HPCPIPE_PIP_ARGS=...  more arguments for pip
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${1:-$root/build/debian}
system=/usr/bin/python3
stamp=$venv/.hpcpipe-installed

say() { printf 'hpcpipe: %s\n' "$*" >&2; }

die() {
    say "error: $*"
    exit 1
}

# Outside of mpirun, Debian's h5py is its serial build unless it is told.
versions=$(H5PY_ALWAYS_USE_MPI=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 "$system" -c '
import ensurepip, sys, h5py, mpi4py, numpy
assert h5py.get_config().mpi, "this h5py has no MPI"
print(sys.version, h5py.version.version, mpi4py.__version__, numpy.__version__)' 2>&1) ||
    die "$system has no parallel h5py (apt-get install python3-h5py-mpi python3-mpi4py openmpi-bin python3-venv):" \
        "$(tail -n 1 <<<"$versions")"

current=$(printf '%s\n' "$versions" "${HPCPIPE_PIP_ARGS:-}" "$(cat "$root"/{pyproject.toml,constraints.txt})")
if [[ -x $venv/bin/python && -f $stamp && $(<"$stamp") == "$current" ]]; then
    exit 0
fi

# What hpcpipe needs without what Debian gives: h5py and mpi4py must be of one build, and NumPy the one they were
# built for.
mapfile -t wanted < <("$system" - "$root/pyproject.toml" <<'PYTHON'
import re
import sys
import tomllib

with open(sys.argv[1], "rb") as file:
    for wanted in tomllib.load(file)["project"]["dependencies"]:
        if re.match(r"[\w-]+", wanted)[0] not in ("h5py", "mpi4py", "numpy", "tomli"):
            print(wanted)
PYTHON
)
# Several arguments in one variable, so they are split on purpose.
# shellcheck disable=SC2206
arguments=(${HPCPIPE_PIP_ARGS:-})
say "making $venv"
rm -rf "$venv"
"$system" -m venv --system-site-packages "$venv"
"$venv/bin/python" -m pip install --quiet --no-compile --constraint "$root/constraints.txt" "${arguments[@]}" \
    "${wanted[@]}" || die "the installation failed, pip says why above"
printf '%s\n' "$current" >"$stamp"
