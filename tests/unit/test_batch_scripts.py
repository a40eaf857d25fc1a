from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcpipe.batch import SUBMIT, JobRequest, write_script
from hpcpipe.batch.indices import parse_indices
from tests.unit.batch_cases import OUT, PATIENT, Desk, request

ROOT = Path(__file__).resolve().parents[2]
JOBS = {
    "slurm by srun": request("slurm"),
    "slurm by mpirun": request("slurm", launcher="mpirun", mpi=None),
    "pbs": request("pbs"),
    "lsf": request("lsf"),
    "none": request("none"),
}
EVERY_JOB = pytest.mark.parametrize("job", JOBS.values(), ids=list(JOBS))
STEP_50 = Desk.checkpoint(50)


def again(job: JobRequest, desk: Desk, **variables: str) -> tuple[bool, int, str]:
    """Whether a script goes on, its exit code, and what it says."""
    if job.scheduler == "none":
        variables.setdefault("THEN", "0")
    ended = desk.run(job, **variables)
    goes_on = {
        "slurm": ended.called("scontrol") == 1,
        "pbs": ended.called("qsub") == 1,
        "lsf": ended.rc == 75,
        "none": ended.called("mpirun") == 2,
    }[job.scheduler]
    assert ended.called("srun") + ended.called("mpirun") == 1 + (goes_on and job.scheduler == "none")
    return goes_on, ended.rc, ended.stderr


@EVERY_JOB
def test_a_complete_run_ends_the_job(job: JobRequest, tmp_path: Path) -> None:
    assert again(job, Desk(tmp_path), CODE="0", GAIN=STEP_50)[:2] == (False, 0)


@EVERY_JOB
def test_a_stop_that_gained_steps_goes_on(job: JobRequest, tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.add_checkpoint(49)

    assert again(job, desk, CODE="75", GAIN=STEP_50)[:2] == (True, 0 if job.scheduler == "none" else 75)


@EVERY_JOB
def test_a_stop_that_gained_nothing_does_not_go_on(job: JobRequest, tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.add_checkpoint(50)

    goes_on, rc, said = again(job, desk, CODE="75")

    assert not goes_on
    assert rc == (1 if job.scheduler == "lsf" else 75)
    assert f"stopped with a checkpoint in {OUT} and not started again: no step was gained" in said


@EVERY_JOB
@pytest.mark.parametrize("code", ["1", "2", "137", "143"])
def test_any_other_end_is_the_jobs_own_even_with_steps_gained(job: JobRequest, code: str, tmp_path: Path) -> None:
    assert again(job, Desk(tmp_path), CODE=code, GAIN=STEP_50)[:2] == (False, int(code))


@EVERY_JOB
def test_a_stop_file_is_obeyed_by_the_script_too(job: JobRequest, tmp_path: Path) -> None:
    goes_on, _, said = again(job, Desk(tmp_path), CODE="75", GAIN=STEP_50, STOP=f"{OUT}/STOP")

    assert not goes_on
    assert f"{OUT}/STOP asked for it; remove that file to go on" in said


@EVERY_JOB
def test_a_job_goes_on_only_so_often(job: JobRequest, tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    (tmp_path / OUT).mkdir(parents=True)
    (tmp_path / OUT / "requeues").write_text("3\n")
    if job.scheduler == "none":
        job = request("none", max_requeues=0)

    goes_on, _, said = again(
        job, desk, CODE="75", GAIN=STEP_50, SLURM_RESTART_COUNT="3", HPCPIPE_REQUEUES="3", HPCPIPE_FOLDER=OUT
    )

    assert not goes_on
    assert "is reached" in said


def test_lsf_counts_its_requeues_in_the_folder(tmp_path: Path) -> None:
    desk = Desk(tmp_path)

    codes = [desk.run(request("lsf"), CODE="75", GAIN=Desk.checkpoint(step)).rc for step in range(1, 5)]

    assert codes == [75, 75, 75, 1]


@pytest.mark.parametrize(
    ("before", "after", "gained"),
    [
        ((50, 0), (50, 1), True),
        ((50, 9), (50, 10), True),
        ((50, 10), (50, 9), False),
        ((99_999, 0), (100_000, 0), True),
        ((9_999_999_999, 0), (10_000_000_000, 0), True),
        ((10_000_000_000, 0), (9_999_999_999, 7), False),
        ((0, 0), (0, 1), True),
    ],
)
def test_checkpoints_are_compared_by_step_and_attempt(
    before: tuple[int, int], after: tuple[int, int], gained: bool, tmp_path: Path
) -> None:
    desk = Desk(tmp_path)
    desk.add_checkpoint(*before)

    assert again(request("slurm"), desk, CODE="75", GAIN=Desk.checkpoint(*after))[0] == gained


def test_a_checkpoint_without_its_commit_record_does_not_count(tmp_path: Path) -> None:
    (tmp_path / STEP_50).mkdir(parents=True)
    (tmp_path / OUT / "checkpoints" / "step-of-mine").mkdir()
    (tmp_path / OUT / "checkpoints" / "step-of-mine" / "commit.json").touch()

    assert not again(request("slurm"), Desk(tmp_path), CODE="75")[0]


def test_without_scontrol_the_script_says_how_to_chain(tmp_path: Path) -> None:
    goes_on, rc, said = again(request("slurm"), Desk(tmp_path, without=("scontrol",)), CODE="75", GAIN=STEP_50)

    assert (goes_on, rc) == (False, 75)
    assert f"HPCPIPE_FOLDER={OUT} sbatch --dependency=afternotok:7" in said


@pytest.mark.parametrize(("scheduler", "said"), [("slurm", "scontrol could not"), ("pbs", "qsub refused")])
def test_a_scheduler_that_refuses_is_named(scheduler: str, said: str, tmp_path: Path) -> None:
    _, rc, stderr = again(request(scheduler), Desk(tmp_path), CODE="75", GAIN=STEP_50, REFUSED="1")

    assert rc == 75
    assert f"not started again: {said}" in stderr


def test_the_ranks_are_started_as_slurm_wants_it(tmp_path: Path) -> None:
    ended = Desk(tmp_path).run(request("slurm", netmod="ofi", overrides=("run.epochs=3",)), CODE="0")

    assert ended.calls == [
        "srun --mpi=pmi2 --kill-on-bad-exit=1 --cpus-per-task=2 hpcpipe train net.toml --out runs/net-7 --resume "
        "auto --set run.epochs=3"
    ]
    environment = (tmp_path / "environment").read_text().splitlines()
    assert {"OMP_NUM_THREADS=2", "MPIR_CVAR_CH4_NETMOD=ofi"} <= set(environment)


@pytest.mark.parametrize(
    ("family", "mpirun", "call"),
    [
        ("mpich", "mpirun", "mpirun -n 4 -ppn 2 -f nodes hpcpipe train"),
        (
            "openmpi",
            "mpirun",
            "mpirun -n 4 --map-by ppr:2:node --bind-to none -x OMP_NUM_THREADS --hostfile nodes hpcpipe train",
        ),
        ("cray", "mpiexec", "mpiexec -n 4 --ppn 2 --depth 2 --cpu-bind depth hpcpipe train"),
        ("other", "mpirun", "mpirun -n 4 hpcpipe train"),
    ],
)
def test_each_mpirun_has_options_of_its_own(family: str, mpirun: str, call: str, tmp_path: Path) -> None:
    ended = Desk(tmp_path).run(request("pbs", family=family, mpirun=mpirun), CODE="0")

    assert ended.calls == [f"{call} net.toml --out runs/net-7 --resume auto"]


def test_an_element_of_a_slurm_array_is_requeued_alone_and_has_its_own_folder_and_seed(tmp_path: Path) -> None:
    job = request("slurm", indices=parse_indices("0-4%2"))
    # One element of an array has the number of the whole array.
    ended = Desk(tmp_path).run(
        job,
        CODE="75",
        GAIN=Desk.checkpoint(1, out="runs/net-7_3"),
        SLURM_ARRAY_JOB_ID="7",
        SLURM_ARRAY_TASK_ID="3",
    )

    assert ended.calls[0].endswith("--out runs/net-7_3 --resume auto --set run.seed=3")
    assert ended.calls[1] == "scontrol requeue 7_3"
    assert "#SBATCH --array=0-4%2\n" in write_script(job)
    assert "#SBATCH --output=net-%A_%a.log\n" in write_script(job)


def test_pbs_hands_the_folder_and_the_count_to_the_next_job(tmp_path: Path) -> None:
    ended = Desk(tmp_path).run(request("pbs"), CODE="75", GAIN=Desk.checkpoint(1), HPCPIPE_REQUEUES="1")

    assert ended.calls[1] == f"qsub -v HPCPIPE_FOLDER={OUT},HPCPIPE_REQUEUES=2 net.pbs"
    assert "goes on as job 8.server" in ended.stderr


def test_an_element_of_a_pbs_array_goes_on_alone(tmp_path: Path) -> None:
    job = request("pbs", indices=parse_indices("0-4"))
    ended = Desk(tmp_path).run(
        job,
        CODE="75",
        GAIN=Desk.checkpoint(1, out="runs/net-7_3"),
        PBS_JOBID="7[3].server",
        PBS_ARRAY_INDEX="3",
    )

    assert ended.calls[0].endswith("--set run.seed=3")
    assert ended.calls[1] == "qsub -v HPCPIPE_FOLDER=runs/net-7,HPCPIPE_INDEX=3,HPCPIPE_REQUEUES=1"
    submitted = (tmp_path / "submitted").read_text()
    assert "#PBS -J" in write_script(job)
    assert submitted == write_script(job).replace("#PBS -J 0-4\n", "")


def test_an_array_without_a_scheduler_takes_one_seed_after_the_other(tmp_path: Path) -> None:
    ended = Desk(tmp_path).run(request("none", indices=parse_indices("1,4")), CODE="0")

    assert [call.split("--set ")[1] for call in ended.calls] == ["run.seed=1", "run.seed=4"]
    assert ended.rc == 0


@pytest.mark.parametrize("name", ["slurm by mpirun", "lsf", "none"])
def test_a_warning_to_the_script_reaches_the_ranks_and_the_job_goes_on(name: str, tmp_path: Path) -> None:
    job, desk = JOBS[name], Desk(tmp_path, launcher=PATIENT)
    process = desk.start(job, GAIN=STEP_50)
    wait_for(tmp_path / "started")
    process.send_signal(signal.SIGUSR1)
    if job.scheduler == "none":
        # It has begun again by itself; this ends it.
        wait_for(tmp_path / STEP_50)
        wait_for(tmp_path / "calls", lines=3)
        process.send_signal(signal.SIGTERM)
    ended = desk.end(process)

    assert ended.rc == 75
    assert "goes on" in ended.stderr
    assert sum(call.startswith("asked after") for call in ended.calls) == (2 if job.scheduler == "none" else 1)
    assert ended.called("scontrol") == (job.scheduler == "slurm")


@pytest.mark.parametrize("name", ["slurm by mpirun", "pbs", "lsf", "none"])
def test_a_job_that_is_cancelled_stops_with_a_checkpoint_and_does_not_go_on(name: str, tmp_path: Path) -> None:
    job, desk = JOBS[name], Desk(tmp_path, launcher=PATIENT)
    process = desk.start(job, GAIN=STEP_50)
    wait_for(tmp_path / "started")
    process.send_signal(signal.SIGTERM)
    ended = desk.end(process)

    assert ended.rc == (1 if job.scheduler == "lsf" else 75)
    assert "not started again: it was asked to end" in ended.stderr
    assert ended.called("scontrol") + ended.called("qsub") == 0


def test_a_cancelled_srun_job_ends_with_its_script(tmp_path: Path) -> None:
    desk = Desk(tmp_path, launcher=PATIENT)
    process = desk.start(request("slurm"), GAIN=STEP_50)
    wait_for(tmp_path / "started")
    process.send_signal(signal.SIGTERM)

    ended = desk.end(process)

    assert ended.rc == -signal.SIGTERM
    assert ended.called("scontrol") == 0


@pytest.mark.parametrize("scheduler", ["pbs", "none"])
def test_where_nobody_warns_of_the_limit_the_script_watches_the_clock(scheduler: str, tmp_path: Path) -> None:
    desk = Desk(tmp_path, launcher=PATIENT)
    ended = desk.run(request(scheduler, time_s=3, signal_before_s=2, max_requeues=1), GAIN=STEP_50)

    assert ended.rc == 75
    assert any(call.startswith("asked after") for call in ended.calls)
    assert "goes on" in ended.stderr


def test_a_folder_named_at_submission_is_gone_on_with(tmp_path: Path) -> None:
    for scheduler in ("slurm", "pbs", "lsf", "none"):
        folder = tmp_path / scheduler
        folder.mkdir()
        ended = Desk(folder).run(request(scheduler), CODE="0", HPCPIPE_FOLDER="runs/an older one")

        assert "--out runs/an older one --resume auto" in ended.calls[0]


def test_a_script_goes_to_its_folder_and_runs_its_setup_first(tmp_path: Path) -> None:
    (tmp_path / "a folder").mkdir()
    # Scripts of modules read variables that are not set.
    job = request("slurm", directory=str(tmp_path / "a folder"), setup=('export FOUND="$NOWHERE$PWD"',))
    ended = Desk(tmp_path).run(job, CODE="0")

    assert ended.rc == 0
    environment = (tmp_path / "a folder" / "environment").read_text().splitlines()
    assert f"FOUND={tmp_path / 'a folder'}" in environment


def test_slurms_header_has_what_was_asked_for() -> None:
    job = request(
        "slurm", gpus_per_node=2, queue="gpu", account="me", qos="high", directives=("--exclusive",), time_s=90000
    )
    header = {line for line in write_script(job).splitlines() if line.startswith("#SBATCH")}

    assert header == {
        f"#SBATCH --{option}"
        for option in (
            "job-name=net",
            "nodes=2",
            "ntasks-per-node=2",
            "cpus-per-task=2",
            "time=1-01:00:00",
            "gpus-per-node=2",
            "partition=gpu",
            "account=me",
            "qos=high",
            "exclusive",
            "output=net-%j.log",
            "open-mode=append",
            "requeue",
            "signal=USR1@300",
        )
    }


def test_a_warning_goes_to_the_script_where_mpirun_starts_the_ranks() -> None:
    assert "#SBATCH --signal=B:USR1@300\n" in write_script(JOBS["slurm by mpirun"])


def test_pbs_headers_have_what_was_asked_for() -> None:
    job = request("pbs", gpus_per_node=2, queue="gpu", account="me", directives=("-m n",), time_s=90000)
    header = [line for line in write_script(job).splitlines() if line.startswith("#PBS")]

    assert header == [
        "#PBS -S /bin/bash",
        "#PBS -N net",
        "#PBS -l select=2:ncpus=4:mpiprocs=2:ompthreads=2:ngpus=2",
        "#PBS -l place=scatter",
        "#PBS -l walltime=25:00:00",
        "#PBS -j oe",
        "#PBS -q gpu",
        "#PBS -A me",
        "#PBS -m n",
    ]


def test_lsf_headers_have_what_was_asked_for() -> None:
    job = request(
        "lsf", gpus_per_node=2, queue="gpu", account="me", indices=parse_indices("1-5%2"), signal_before_s=90
    )
    header = [line for line in write_script(job).splitlines() if line.startswith("#BSUB")]

    assert header == [
        '#BSUB -J "net[1-5]%2"',
        "#BSUB -n 4",
        '#BSUB -R "span[ptile=2]"',
        '#BSUB -R "affinity[core(2)]"',
        "#BSUB -W 1:00",
        "#BSUB -q gpu",
        "#BSUB -P me",
        '#BSUB -gpu "num=2/host"',
        "#BSUB -o net-%J_%I.report",
        "#BSUB -wt 2",
        "#BSUB -wa USR1",
        '#BSUB -Q "75"',
        "#BSUB -r",
    ]


def examples() -> dict[str, str]:
    shown = subprocess.run(
        [sys.executable, "tools/make_job_scripts.py", "--print"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    made = json.loads(shown.stdout)
    assert isinstance(made, dict)
    return made


def test_the_example_scripts_are_up_to_date() -> None:
    kept = {path.name: path.read_text() for path in (ROOT / "jobs").iterdir() if path.suffix != ".toml"}

    assert kept == examples()


def test_every_example_and_every_kind_of_script_is_good_bash(tmp_path: Path) -> None:
    texts = examples()
    texts |= {name: write_script(job) for name, job in JOBS.items()}
    for scheduler in SUBMIT:
        job = request(scheduler, indices=parse_indices("1-3"), directory="/a b", setup=("module load x",))
        texts[f"array {scheduler}"] = write_script(job)
    paths = []
    for name, text in texts.items():
        paths.append(tmp_path / name.replace(" ", "-"))
        paths[-1].write_text(text)
        assert max(len(line) for line in text.splitlines()) < 125, name

    for path in paths:
        assert subprocess.run(["bash", "-n", path], capture_output=True, check=False).stderr == b"", path.name
    shellcheck = shutil.which("shellcheck")
    if shellcheck is not None:
        # It need not follow what a user sources.
        command = [shellcheck, "--exclude=SC1091", *map(str, paths)]
        assert subprocess.run(command, capture_output=True, text=True, check=False).stdout == ""


def wait_for(path: Path, *, lines: int = 0) -> None:
    """Until a file is there, with so many lines."""
    until = time.monotonic() + 20
    while not path.exists() or (lines and len(path.read_text().splitlines()) < lines):
        assert time.monotonic() < until, f"{path} did not appear"
        time.sleep(0.02)
