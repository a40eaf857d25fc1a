#!/usr/bin/env bash
# What only a machine with a GPU can tell: builds the CUDA side, runs tests/gpu and several ranks on one card, and prints
# figures. Under five minutes once everything is installed; each step has a limit, and a failed one does not stop the rest.
#
#   bash tools/gpu_check.sh
#
# Where the torch of PYTHON (default: python3) sees the GPU, it is used, with the CuPy beside it, and what is missing is
# installed next to them; else all comes into .venv, as tools/setup.sh says. Without a network:
#
#   HPCPIPE_WHEELS=DIR bash tools/gpu_check.sh      wheels of what is missing, such as mpich and pydantic
#
# Exit codes: 0 all is well, 1 something failed (named at the end), 2 there is no GPU.
set -uo pipefail
# shellcheck source=tools/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$root" || exit
limit_s=285
results=$root/build/gpu-check
passed=()
failed=()
mkdir -p "$results"

if ! nvidia-smi -L 2>/dev/null | grep -q '^GPU' && [[ ! -e /dev/nvidia0 ]]; then
    say "there is no GPU here (nvidia-smi shows none), so there is nothing to check"
    exit 2
fi

# Modules that are not there, as names that pip knows; mpich brings mpirun.
missing() {
    "$python" - <<'PYTHON'
from importlib.util import find_spec

needed = {
    "click": "click", "cupy": "cupy-cuda13x", "h5py": "h5py", "hypothesis": "hypothesis", "mpi4py": "mpi4py",
    "nanobind": "nanobind", "ninja": "ninja", "pydantic": "pydantic", "pytest": "pytest",
    "pytest_timeout": "pytest-timeout", "safetensors": "safetensors", "setuptools": "setuptools",
    "sklearn": "scikit-learn", "tqdm": "tqdm",
}
print(*(package for module, package in needed.items() if find_spec(module) is None))
PYTHON
}

pip_into() {
    "$base" -m pip --python "$python" install --quiet "$@" ||
        die "pip could not install ${*: -1}; without a network, name a folder of wheels with HPCPIPE_WHEELS"
}

# An environment that sees the packages of the base and has room for more.
build_upon() {
    local wheels packages
    venv=$root/build/gpu-venv
    python=$venv/bin/python
    if [[ ! -x $python ]]; then
        "$base" -m venv --without-pip "$venv" || die "$base cannot make $venv"
        # The base may itself be a virtual environment, whose packages --system-site-packages would not show.
        "$base" -c 'import site; print(*site.getsitepackages(), sep="\n")' \
            >"$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/base.pth"
    fi
    if [[ -n ${HPCPIPE_WHEELS:-} ]]; then
        wheels=("$HPCPIPE_WHEELS"/*.whl)
        pip_into --no-index --no-deps --ignore-installed "${wheels[@]}"
    else
        read -ra packages < <(missing)
        ((${#packages[@]} == 0)) || pip_into --constraint constraints.txt "${packages[@]}"
    fi
    # An MPI package beside the base's Python would not be found from here.
    uses_system_mpi || [[ -x $venv/bin/mpirun ]] || pip_into --constraint constraints.txt --ignore-installed mpich
    read -ra packages < <(missing)
    ((${#packages[@]} == 0)) || die "still missing: ${packages[*]}"
    choose_mpirun
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PATH=$venv/bin:$PATH
}

# step NAME LIMIT COMMAND...
step() {
    local name=$1 limit=$2 left=$((limit_s - SECONDS)) began=$SECONDS code
    shift 2
    ((limit <= left)) || limit=$left
    if ((limit < 5)); then
        say "no time is left for: $name"
        failed+=("$name (no time left)")
        return
    fi
    say "$name"
    timeout --signal=INT --kill-after=10 "$limit" "$@" </dev/null
    code=$?
    if ((code == 0)); then
        passed+=("$name")
        say "$name: done in $((SECONDS - began)) s"
    elif ((code == 124 || code == 137)); then
        failed+=("$name (over $limit s)")
        say "$name: FAILED, not done within $limit s"
    else
        failed+=("$name (exit code $code)")
        say "$name: FAILED with exit code $code"
    fi
}

base=${PYTHON:-python3}
if "$base" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    build_upon
else
    set_up dev examples cuda13
    "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
        die "the torch in .venv sees no GPU: its CUDA and this driver do not fit; name another Python with PYTHON=..."
fi
SECONDS=0
export PYTHONPATH=$root PYTHONUNBUFFERED=1 HPCPIPE_REQUIRE_EXTENSION=1
unset CI
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null
if [[ -z ${HPCPIPE_CUDA_ARCHITECTURES:-} ]]; then
    # Only what this card needs: that builds in a third of the time.
    card=$("$python" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())') &&
        export HPCPIPE_CUDA_ARCHITECTURES=$card-real
fi
ranks() { printf '%s\n' "${mpirun_command[@]}" -n "$1" "$python" -m hpcpipe; }
mapfile -t two < <(ranks 2)
mapfile -t four < <(ranks 4)

step "build the extension with CUDA" 150 "$python" setup.py --quiet build_ext --inplace
step "the extension runs on the card" 30 "$python" -c \
    'from hpcpipe.optim.native import available; reason = available("cuda"); print(reason or "available"); raise SystemExit(reason is not None)'
step "doctor" 60 "$python" -m hpcpipe doctor
gpu_tests() {
    "$python" -m pytest tests/gpu -q -p no:cacheprovider | tee "$results/tests.log"
    # Tests that were all skipped have shown nothing.
    ((PIPESTATUS[0] == 0)) && grep -q '[1-9][0-9]* passed' "$results/tests.log"
}
export -f gpu_tests
export python results
step "tests of the GPU" 120 bash -c gpu_tests
step "digits, four ranks on one card" 60 "${four[@]}" train jobs/digits-mlp.toml --out "$results/digits" --overwrite \
    --set run.device=cuda --set run.epochs=3
step "GPT in bfloat16, two ranks on one card" 60 "${two[@]}" train jobs/text-gpt.toml --out "$results/gpt" --overwrite \
    --set run.device=cuda --set run.dtype=bfloat16 --set run.max_steps=60 --set eval.batches=4
step "bench update" 60 "$python" -m hpcpipe bench update --device cuda --threads 1
step "bench link" 60 "${two[@]}" bench link --device cuda

say "${#passed[@]} steps passed in $SECONDS s"
if ((${#failed[@]})); then
    say "FAILED:"
    for name in "${failed[@]}"; do say "  $name"; done
    exit 1
fi
