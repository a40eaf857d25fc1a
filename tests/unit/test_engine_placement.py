from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpcpipe.config import RunConfig
from hpcpipe.config.load import parse_run
from hpcpipe.engine.placement import Placement, Quota, Sight, cpu_quota, find_placement, placement_of
from hpcpipe.engine.resources import choose_device, choose_threads, set_threads, sharing_of
from hpcpipe.errors import ConfigError
from hpcpipe.transport.launcher import LocalClaim
from tests.oracle.lone_world import LoneWorld

SLURM = "SLURM_LOCALID"
IN_A_STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}


def sight(
    claim: tuple[int, str] | None = None,
    *,
    host: str = "n0",
    cpus: range = range(8),
    quota: Quota | None = None,
) -> Sight:
    said = None if claim is None else LocalClaim(rank=claim[0], variable=claim[1])
    return Sight(host=host, claim=said, cpus=frozenset(cpus), quota=quota)


def alone(*, cpus: int = 8, local_rank: int = 0) -> Placement:
    return Placement(
        local_rank=local_rank,
        cpus=cpus,
        share=cpus,
        sharing=1,
        quota=None,
        quota_sharing=1,
        remarks=(),
    )


def config(**run: object) -> RunConfig:
    tables = {"run": run, "model": {"name": "mlp"}, "data": {"name": "digits"}, "optimizer": {"name": "sgd"}}
    return parse_run(tables, overrides=["optimizer.lr=0.1", "optimizer.momentum=0.9"])


def test_without_a_launchers_word_ranks_are_counted_on_each_host() -> None:
    sights = [sight(host=host) for host in ("n0", "n1", "n0", "n1")]

    assert [placement_of(rank, sights).local_rank for rank in range(4)] == [0, 0, 1, 1]
    assert all(placement_of(rank, sights).remarks == () for rank in range(4))


def test_a_launchers_number_that_agrees_with_the_count_needs_no_remark() -> None:
    sights = [sight((0, SLURM)), sight((1, SLURM)), sight((0, SLURM), host="n1")]

    assert [placement_of(rank, sights).local_rank for rank in range(3)] == [0, 1, 0]
    assert all(placement_of(rank, sights).remarks == () for rank in range(3))


def test_variables_inherited_by_all_ranks_of_a_host_are_not_believed() -> None:
    sights = [sight((0, SLURM)), sight((0, SLURM)), sight((0, SLURM))]

    placed = [placement_of(rank, sights) for rank in range(3)]

    assert [each.local_rank for each in placed] == [0, 1, 2]
    assert all("SLURM_LOCALID does not tell the ranks of n0 apart" in each.remarks[0] for each in placed)


@pytest.mark.parametrize(
    "claims", [[(1, SLURM), None], [(1, SLURM), (0, "MPI_LOCALRANKID")]], ids=["one of two", "two launchers"]
)
def test_numbers_that_not_all_ranks_of_a_host_have_from_one_launcher_are_not_believed(
    claims: list[tuple[int, str] | None],
) -> None:
    assert placement_of(0, [sight(claim) for claim in claims]).local_rank == 0


def test_containers_that_name_one_host_differently_follow_the_launcher() -> None:
    sights = [sight((0, SLURM), host="a"), sight((1, SLURM), host="b")]

    second = placement_of(1, sights)

    assert second.local_rank == 1
    assert "rank 1 is number 1 on its host by SLURM_LOCALID, but number 0 by counting" in second.remarks[0]


def test_ranks_on_the_same_cpus_divide_them_and_ranks_on_their_own_do_not() -> None:
    shared = [sight() for _ in range(4)]
    bound = [sight(cpus=range(4 * rank, 4 * rank + 4)) for rank in range(4)]
    elsewhere = [sight(), sight(host="n1")]

    assert placement_of(1, shared).share == pytest.approx(2)
    assert placement_of(1, bound).share == pytest.approx(4)
    assert placement_of(0, elsewhere).share == pytest.approx(8)


def test_ranks_on_cpus_that_overlap_in_part_divide_that_part() -> None:
    sights = [sight(cpus=range(4)), sight(cpus=range(2, 6))]

    assert placement_of(0, sights).share == pytest.approx(2 + 2 / 2)


def test_a_limit_of_a_cgroup_is_divided_by_the_ranks_in_it() -> None:
    one, other = Quota(cpus=3, group="/job"), Quota(cpus=3, group="/other")
    sights = [sight(quota=one), sight(quota=one), sight(quota=other)]

    assert [placement_of(rank, sights).quota for rank in range(3)] == [1.5, 1.5, 3]


@pytest.mark.parametrize(
    ("asked", "environment", "placement", "count", "source"),
    [
        (3, {"OMP_NUM_THREADS": "1"}, alone(), 3, "run.threads"),
        (None, {}, alone(), 8, "the 8 CPUs that it may run on alone"),
        (None, {**IN_A_STEP, "SLURM_CPUS_PER_TASK": "4"}, alone(), 4, "SLURM_CPUS_PER_TASK"),
        # A batch script has the variable too, but says nothing about an mpirun below it.
        (None, {"SLURM_PROCID": "0", "SLURM_CPUS_PER_TASK": "4"}, alone(), 8, "the 8 CPUs"),
        (None, {}, placement_of(0, [sight()] * 3), 2, "the 8 CPUs that 3 ranks of a host share"),
        (None, {}, placement_of(0, [sight()] * 9), 1, "9 ranks"),
        (
            None,
            {},
            placement_of(0, [sight(quota=Quota(cpus=5, group="/job"))] * 2),
            2,
            "its cgroup's limit of 5 CPUs for 2 ranks",
        ),
        (None, {}, placement_of(0, [sight(quota=Quota(cpus=0.5, group="/job"))]), 1, "limit of 0.5 CPUs"),
    ],
)
def test_threads_come_from_the_allocation(
    asked: int | None, environment: dict[str, str], placement: Placement, count: int, source: str
) -> None:
    threads = choose_threads(asked, environment, placement)

    assert threads is not None
    assert threads.count == count
    assert source in threads.source
    assert threads.line.startswith(f"threads: {count} a rank (")


def test_an_srun_that_lost_cpus_per_task_is_said_to_have() -> None:
    threads = choose_threads(None, {**IN_A_STEP, "SLURM_CPUS_PER_TASK": "8"}, alone(cpus=1))

    assert threads is not None
    assert threads.count == 1
    assert "SLURM_CPUS_PER_TASK says 8, but srun does not take --cpus-per-task over from sbatch" in threads.line


def test_omp_num_threads_is_left_to_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")

    threads = set_threads(config(), alone())

    assert threads.count == torch.get_num_threads()
    assert threads.source == "OMP_NUM_THREADS"


def test_a_rank_sees_its_host() -> None:
    placement = find_placement(LoneWorld(), {})

    assert placement.local_rank == 0
    assert placement.share == placement.cpus >= 1


def test_the_tightest_limit_of_a_cgroup_and_those_above_it_counts(tmp_path: Path) -> None:
    for group, text in ((".", "max 100000"), ("job", "150000 100000"), ("job/step", "400000 100000")):
        (tmp_path / group).mkdir(exist_ok=True)
        (tmp_path / group / "cpu.max").write_text(text + "\n")
    (tmp_path / "membership").write_text("0::/job/step\n")

    assert cpu_quota(tmp_path / "membership", tmp_path) == Quota(cpus=1.5, group=str(tmp_path / "job"))


def test_limits_of_the_first_version_of_cgroups_are_read(tmp_path: Path) -> None:
    group = tmp_path / "cpu,cpuacct"
    group.mkdir()
    (group / "cpu.cfs_quota_us").write_text("250000\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")
    # Inside a container the path is that of the host, and is not there.
    (tmp_path / "membership").write_text("5:memory:/x\n3:cpu,cpuacct:/slurm/job\n0::/\n")

    assert cpu_quota(tmp_path / "membership", tmp_path) == Quota(cpus=2.5, group=str(group))


@pytest.mark.parametrize("text", ["-1", "garbage", ""], ids=["none", "no number", "empty"])
def test_a_cgroup_without_a_limit_sets_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(text + "\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "membership").write_text("1:cpu:/\n0::/../outside\n")

    assert cpu_quota(tmp_path / "membership", tmp_path) is None
    assert cpu_quota(tmp_path / "missing", tmp_path) is None


class FakeCuda:
    """As many GPUs as said, without one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.chosen: list[torch.device] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        monkeypatch.setattr(torch.cuda, "set_device", self.chosen.append)


@pytest.mark.parametrize(
    ("visible", "local_rank", "index"),
    [(4, 0, 0), (4, 3, 3), (1, 3, 0), (2, 3, 1)],
    ids=["first", "last", "the only one that --gpus-per-task leaves", "shared"],
)
def test_a_rank_takes_the_gpu_of_its_number_among_those_it_sees(
    monkeypatch: pytest.MonkeyPatch, visible: int, local_rank: int, index: int
) -> None:
    cuda = FakeCuda(monkeypatch, visible)

    device = choose_device(config(), alone(local_rank=local_rank))

    assert device == torch.device("cuda", index)
    assert cuda.chosen == [device]


def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch, 0)

    assert choose_device(config(), alone()).type == "cpu"
    with pytest.raises(ConfigError, match="torch sees no GPU on this host"):
        choose_device(config(device="cuda"), alone())


def test_cpu_is_the_cpu_where_there_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch, 4)

    assert choose_device(config(device="cpu"), alone()).type == "cpu"


def test_ranks_that_share_a_gpu_hear_of_it_in_one_line() -> None:
    devices = [("n0", "GPU a"), ("n0", "GPU b"), ("n0", "GPU a"), ("n1", "GPU a"), ("n0", None), ("n0", None)]

    lines = [sharing_of(rank, devices) for rank in range(6)]

    assert lines[0] == lines[2]
    assert "ranks 0 and 2 share a GPU (GPU a of n0)" in lines[0][0]
    assert lines[1] == lines[3] == lines[4] == lines[5] == []
