#!/usr/bin/env bash
# From a fresh clone to a trained network: installs hpcpipe into .venv and trains on handwritten digits over 4 ranks.
#
#   bash tools/quickstart.sh
#
# Needs Python 3.10 or newer; a C++ compiler makes updates faster. tools/setup.sh tells what can be set.
set -uo pipefail
# shellcheck source=tools/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
set_up examples
cd "$root" || exit

out=runs/digits-mlp
progress=lines
# Ranks see a pipe where this script sees a terminal.
[[ -t 2 ]] && progress=bar
say "training on 4 ranks: $(basename "$mpirun") -n 4 hpcpipe train jobs/digits-mlp.toml"
"${mpirun_command[@]}" -n 4 hpcpipe train jobs/digits-mlp.toml --out "$out" --overwrite --progress "$progress" \
    </dev/null || die "training failed with exit code $?; hpcpipe doctor tells what this installation can do"
"$python" tools/show_summary.py "$out"
