"""Profiles that several ranks take together, and topologies of all ranks of a job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcpipe.planning.profile import load_profile
from hpcpipe.planning.topology import load_topology
from tests.mpi.launch import Result, run
from tests.oracle.cases import NETS
from tests.oracle.runs import configured, write_run_file
from tests.unit.measured_nets import net, profile_of

COMMAND = ["-m", "hpcpipe.cli.main"]


def profiled(tmp_path: Path, ranks: int, *arguments: str, **sections: dict[str, object]) -> Result:
    run_file = write_run_file(configured(tmp_path / "run", **sections))
    output = str(tmp_path / "profile.json")
    return run(COMMAND, ranks, "profile", str(run_file), "-o", output, "--repeats", "2", *arguments)


def test_ranks_that_measure_at_the_same_time_agree_on_one_profile(tmp_path: Path) -> None:
    sections = NETS["batchnorm and dropout"]
    result = profiled(tmp_path, 2, "--concurrent", "--json", **sections)
    assert result.rc == 0, result
    found, alone = load_profile(tmp_path / "profile.json"), profile_of(configured(**sections))
    assert json.loads(result.stdout)["rows"] == found.rows
    assert found.about["ranks_measuring"] == 2
    assert found.about["message_s"] == "measured"
    assert [(layer.name, layer.output_bytes, layer.saved_bytes) for layer in found.layers] == [
        (layer.name, layer.output_bytes, layer.saved_bytes) for layer in alone.layers
    ]


def test_rank_0_measures_alone_while_the_others_wait(tmp_path: Path) -> None:
    result = profiled(tmp_path, 3, **net("build_chain"))
    assert result.rc == 0, result
    assert "one rank measured alone" in result.stdout
    about = load_profile(tmp_path / "profile.json").about
    assert (about["ranks_measuring"], about["message_s"]) == (1, "measured")


@pytest.mark.parametrize("arguments", [[], ["--concurrent"]], ids=["alone", "concurrent"])
def test_a_layer_that_fails_on_all_ranks_is_named_once(arguments: list[str], tmp_path: Path) -> None:
    result = profiled(tmp_path, 2, *arguments, **net("build_unfit"))
    assert result.rc == 2, result
    assert result.stderr.count("layer '2' failed in its forward pass") == 1
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_ranks_of_one_host_are_one_level(ranks: int, tmp_path: Path) -> None:
    result = run("topology_file.py", ranks, str(tmp_path / "topology.json"))
    assert result.rc == 0, result
    topology = load_topology(tmp_path / "topology.json")
    (level,) = topology.levels
    assert (level.name, level.size, topology.about["ranks"]) == ("node", ranks, ranks)
    assert level.allreduce_bandwidth is not None
    assert [row["bytes"] for row in topology.about["messages"]] == [8, 1 << 12]


def test_two_hosts_are_two_levels(tmp_path: Path) -> None:
    result = run("topology_file.py", 4, str(tmp_path / "topology.json"), "a,a,b,b")
    assert result.rc == 0, result
    inner, outer = load_topology(tmp_path / "topology.json").levels
    assert [(inner.name, inner.size), (outer.name, outer.size)] == [("node", 2), ("network", 4)]


def test_the_command_shows_what_it_writes(tmp_path: Path) -> None:
    result = run(COMMAND, 2, "bench", "link", "--topology", str(tmp_path / "topology.json"))
    assert result.rc == 0, result
    assert result.stdout.splitlines()[-1] == f"written to {tmp_path / 'topology.json'}"
    assert load_topology(tmp_path / "topology.json").ranks == 2
