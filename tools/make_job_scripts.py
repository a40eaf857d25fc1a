"""Writes the example scripts of jobs/ by the code behind `hpcpipe job`, so that the two cannot differ.

python tools/make_job_scripts.py            write them
python tools/make_job_scripts.py --print    print them as one JSON object instead, name to text
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hpcpipe.batch import JobRequest, write_script  # noqa: E402  # the path must be set first
from hpcpipe.batch.indices import parse_indices  # noqa: E402
from hpcpipe.batch.pieces import comment  # noqa: E402

GPT = {"run_file": "jobs/text-gpt.toml", "name": "text-gpt", "out": "runs/text-gpt"}
DIGITS = {"run_file": "jobs/digits-mlp.toml", "name": "digits-mlp", "out": "runs/digits-mlp"}
BY_SRUN = {"scheduler": "slurm", "launcher": "srun", "family": "mpich", "mpi": "pmi2", "netmod": "ofi"}
ACTIVATE = ("source .venv/bin/activate",)
FOUR_HOURS, HALF_AN_HOUR = 4 * 3600, 1800

# Under each name: what the example is for, and the request.
EXAMPLES = {
    "slurm-one-node.sbatch": (
        "One node, four ranks on its cores.",
        {
            **DIGITS,
            **BY_SRUN,
            "ranks_per_node": 4,
            "cpus_per_rank": 2,
            "time_s": HALF_AN_HOUR,
            "signal_before_s": 120,
        },
    ),
    "slurm-gpus.sbatch": (
        "Several nodes, one rank a GPU: each takes the GPU of its number on the node. A GPT of four blocks has six"
        " layers, so model.depth must grow with the ranks, as here.",
        {
            **GPT,
            **BY_SRUN,
            "nodes": 2,
            "ranks_per_node": 4,
            "cpus_per_rank": 8,
            "gpus_per_node": 4,
            "time_s": FOUR_HOURS,
            "overrides": ("model.depth=12",),
        },
    ),
    "slurm-chain.sbatch": (
        "A run longer than any job may be: the script requeues itself up to fifty times.",
        {
            **GPT,
            **BY_SRUN,
            "ranks_per_node": 4,
            "time_s": HALF_AN_HOUR,
            "max_requeues": 50,
            "signal_before_s": 180,
        },
    ),
    "slurm-seeds.sbatch": (
        "A job array: one run for each seed, in folders of their own, at most two at a time.",
        {
            **DIGITS,
            **BY_SRUN,
            "ranks_per_node": 4,
            "time_s": HALF_AN_HOUR,
            "signal_before_s": 120,
            "indices": parse_indices("0-4%2"),
        },
    ),
    "slurm-mpirun-openmpi.sbatch": (
        "Open MPI's mpirun inside a Slurm job, for sites whose srun lacks PMIx.",
        {
            **GPT,
            "scheduler": "slurm",
            "launcher": "mpirun",
            "family": "openmpi",
            "nodes": 2,
            "ranks_per_node": 2,
            "cpus_per_rank": 8,
            "time_s": FOUR_HOURS,
            "setup": ("module load openmpi", *ACTIVATE),
        },
    ),
    "slurm-cray.sbatch": (
        "A Cray's srun and Cray MPICH; mpi4py built for it (docs/run-on-a-cluster.md).",
        {
            **GPT,
            **BY_SRUN,
            "family": "cray",
            "mpi": "cray_shasta",
            "netmod": None,
            "nodes": 2,
            "ranks_per_node": 2,
            "cpus_per_rank": 16,
            "gpus_per_node": 2,
            "time_s": FOUR_HOURS,
            "setup": ("module load cray-mpich", "export MPICH_GPU_SUPPORT_ENABLED=1", *ACTIVATE),
        },
    ),
    "mpirun-mpich.sh": (
        "No scheduler: MPICH's mpirun on one host.",
        {**DIGITS, "scheduler": "none", "launcher": "mpirun", "family": "mpich", "ranks_per_node": 4},
    ),
    "mpirun-openmpi.sh": (
        "No scheduler: Open MPI's mpirun on one host, which may have fewer cores than ranks.",
        {**DIGITS, "scheduler": "none", "launcher": "mpirun", "family": "openmpi", "ranks_per_node": 4},
    ),
    "pbs.pbs": (
        "PBS with MPICH's mpirun on two nodes.",
        {
            **GPT,
            "scheduler": "pbs",
            "launcher": "mpirun",
            "family": "mpich",
            "nodes": 2,
            "ranks_per_node": 2,
            "cpus_per_rank": 8,
            "time_s": FOUR_HOURS,
            "script": "jobs/pbs.pbs",
        },
    ),
    "lsf.bsub": (
        "LSF with Open MPI's mpirun on two nodes.",
        {
            **GPT,
            "scheduler": "lsf",
            "launcher": "mpirun",
            "family": "openmpi",
            "nodes": 2,
            "ranks_per_node": 2,
            "cpus_per_rank": 8,
            "time_s": FOUR_HOURS,
            "setup": ("module load openmpi", *ACTIVATE),
        },
    ),
}


def scripts() -> dict[str, str]:
    """The text of every example by its name."""
    made = {}
    for name, (purpose, options) in EXAMPLES.items():
        given = {"setup": ACTIVATE, "out_by_job": options["scheduler"] != "none", **options}
        text = write_script(JobRequest(command=("hpcpipe",), **given), file=f"jobs/{name}")
        first, _, rest = text.partition("\n")
        about = (
            f"{purpose} Start it from the folder that holds .venv and jobs/. An example made by "
            "tools/make_job_scripts.py: `hpcpipe job` writes one for your run file and your installation."
        )
        made[name] = f"{first}\n{comment(about)}\n#\n{rest}"
    return made


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        sys.stdout.write(json.dumps(scripts()))
    else:
        for name, text in scripts().items():
            path = ROOT / "jobs" / name
            path.write_text(text, encoding="utf-8")
            path.chmod(0o755)
