#!/bin/bash
# No scheduler: MPICH's mpirun on one host. Start it from the folder that holds .venv and jobs/. An example
# made by tools/make_job_scripts.py: `hpcpipe job` writes one for your run file and your installation.
#
# digits-mlp: 4 ranks on 1 node. Stopped with a checkpoint it goes on by itself until the run is complete.
# Written by `hpcpipe job`; change what you like.
#
#   bash jobs/mpirun-mpich.sh

source .venv/bin/activate
set -uo pipefail

# Called again it goes on there, from the newest checkpoint.
out=${HPCPIPE_FOLDER:-runs/digits-mlp}
max_requeues=10
requeues=0

# As many threads as cores were asked for; the host may have more.
export OMP_NUM_THREADS=1

say() { printf '%s: %s\n' digits-mlp "$*" >&2; }

# The newest committed checkpoint: text that sorts by step and attempt; nothing where there is none.
newest() {
    local record key best=""
    for record in "$out"/checkpoints/step-*/commit.json; do
        [[ $record =~ /step-([0-9]+)(\.([0-9]+))?/commit\.json$ ]] || continue
        printf -v key '%018d.%09d' "$((10#${BASH_REMATCH[1]}))" "$((10#${BASH_REMATCH[3]:-0}))"
        [[ $key > $best ]] && best=$key
    done
    printf '%s\n' "$best"
}

while :; do
    before=$(newest)
    mpirun -n 4 -ppn 4 \
        hpcpipe train jobs/digits-mlp.toml --out "$out" --resume auto &
    ranks=$!
    asked=""
    # A warning of the time limit asks the ranks for a checkpoint. So does an end from outside, after which
    # nothing may start again.
    trap 'asked=${asked:-limit}; kill -USR1 "$ranks"' USR1
    trap 'asked=end; kill -USR1 "$ranks"' TERM INT
    # A signal ends `wait` before the ranks have ended.
    while kill -0 "$ranks" 2>/dev/null; do wait "$ranks"; done
    wait "$ranks"
    code=$?

    # 0: the run is complete. 75: it stopped on request and has left a checkpoint, so the same command goes on
    # from there. Anything else wants to be looked at, and is not repeated.
    if ((code != 75)); then
        exit "$code"
    elif [[ $asked == end ]]; then
        why="it was asked to end"
    elif [[ -e $out/STOP ]]; then
        why="$out/STOP asked for it; remove that file to go on"
    elif [[ ! $(newest) > $before ]]; then
        why="no step was gained since it started"
    elif ((requeues >= max_requeues)); then
        why="max_requeues=$max_requeues is reached"
    else
        requeues=$((requeues + 1))
        say "goes on from its checkpoint"
        continue
    fi
    say "stopped with a checkpoint in $out and not started again: $why"
    exit 75
done
