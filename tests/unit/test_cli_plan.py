"""`hpcpipe plan`: from a profile to a plan and its reasons, wrong input in one line, and nothing heavy loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hpcpipe.cli import main as command_line
from hpcpipe.planning.plan_file import load_plan
from hpcpipe.planning.profile import Profile, load_profile, profile_table, save_profile
from hpcpipe.planning.topology import save_topology
from hpcpipe.simulation.predict import predict
from tests.unit.planning_cases import PROFILES, chain, nodes

VGG16 = str(PROFILES / "vgg16.txt")


def hpcpipe(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(command_line.hpcpipe, ["plan", *arguments], env=environment)


def found(*arguments: str) -> dict[str, Any]:
    result = hpcpipe(*arguments, "--json")
    assert result.exit_code == 0, result.output
    table: dict[str, Any] = json.loads(result.output)
    return table


def saved(folder: Path, profile: Profile) -> str:
    path = folder / "profile.json"
    save_profile(profile, path)
    return str(path)


def refusal(*arguments: str) -> str:
    """What the command says on standard error; it must be one line, and code 2."""
    code = "import sys\nfrom hpcpipe.cli.main import main\nmain()"
    command = [sys.executable, "-c", code, "plan", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.count("\n") == 1
    return done.stderr


# -- plans -------------------------------------------------------------------------------------------------


def test_the_slowest_stage_is_as_fast_as_can_be(tmp_path: Path) -> None:
    table = found(saved(tmp_path, chain(3, 1, 2, 2)), "--ranks", "2", "--straight", "--bandwidth", "1GB/s")

    assert table["bottleneck_s"] == pytest.approx(4)
    assert [stage["layers"] for stage in table["stages"]] == [["a", "b"], ["c", "d"]]


def test_the_forecast_is_that_of_the_simulator(tmp_path: Path) -> None:
    profile = saved(tmp_path, chain(3, 1, 2, 2, output_bytes=10**8))
    plan = tmp_path / "plan.json"

    table = found(profile, "--ranks", "3", "--straight", "--bandwidth", "1GB/s", "--output", str(plan))

    simulated = predict(load_plan(plan), minibatches=table["simulated_minibatches"])
    assert table["samples_per_s"] == simulated.samples_per_s
    assert table["bubble"] == simulated.bubble


@pytest.mark.parametrize(
    ("ranks", "links", "replicas"),
    [
        # One server of 4 GPUs on a slow bus, and 4 servers of 4 on 10 Gbit/s.
        (4, ["--bandwidth", "10Gbit/s"], [3, 1]),
        (16, ["--ranks-per-node", "4", "--bandwidth", "12GB/s", "--bandwidth", "10Gbit/s"], [15, 1]),
    ],
)
@pytest.mark.parametrize("allreduce", ["ring", "server"])
def test_vgg16_has_many_replicas_of_convolutions_and_few_of_fully_connected_layers(
    ranks: int, links: list[str], replicas: list[int], allreduce: str
) -> None:
    table = found(VGG16, "--ranks", str(ranks), *links, "--all-reduce", allreduce)

    assert table["replicas"] == replicas
    assert table["stages"][-1]["layers"][-1] == "node41 Linear"
    assert {"node35 Linear", "node38 Linear"} <= set(table["stages"][-1]["layers"])


def test_the_report_shows_the_plan_and_what_it_was_chosen_over() -> None:
    result = hpcpipe(VGG16, "--ranks", "4", "--bandwidth", "10Gbit/s", "--latency", "20us", "--rows", "128")

    assert result.exit_code == 0
    head, stages, outlook, plans = result.output.rstrip().split("\n\n")
    assert head.splitlines()[0].endswith(" for a minibatch of 128 samples on one rank, 527.8 MiB of parameters")
    assert head.splitlines()[1] == "pipedream (spectrain) on 4 ranks: links at 1.25 GB/s, 20 µs"
    assert [line.split()[0] for line in stages.splitlines()[:3]] == ["stage", "0", "1"]
    assert [line.split("  ")[0] for line in outlook.splitlines()] == ["predicted", "limited by"]
    assert " samples/s, " in outlook
    assert "(simulated, 200 minibatches)" in outlook
    names = [line.split("  ")[0] for line in plans.splitlines()]
    assert names == [
        "plan",
        "this plan",
        "lowest cost",
        "data parallel",
        "straight pipeline",
        "two stages (the same)",
    ]


def test_the_lowest_cost_is_taken_if_asked_for() -> None:
    options = (VGG16, "--ranks", "4", "--bandwidth", "10Gbit/s")

    by_cost, by_simulation = found(*options, "--choose-by", "cost"), found(*options)

    assert (by_cost["replicas"], by_simulation["replicas"]) == ([4], [3, 1])
    assert by_cost["seconds"] < by_simulation["seconds"]
    assert by_cost["minibatches_per_s"] < by_simulation["minibatches_per_s"]
    assert by_simulation["alternatives"][0]["name"] == "lowest cost"


def test_a_restriction_excludes_what_is_faster_and_says_so() -> None:
    result = hpcpipe(VGG16, "--ranks", "4", "--bandwidth", "10Gbit/s", "--max-stages", "1")

    assert "\nthis plan                 4 " in result.output
    assert "\nbut          faster in the simulation: two stages (" in result.output


def test_the_plan_file_holds_everything(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"

    result = hpcpipe(VGG16, "--ranks", "4", "--bandwidth", "10Gbit/s", "--memory", "40GiB", "-o", str(path))

    plan = load_plan(path)
    assert result.output.endswith(f"\nwritten to {path}; train by it: hpcpipe train RUN.toml --plan {path}\n")
    assert plan.replicas == (3, 1)
    assert plan.profile == load_profile(VGG16)
    assert (plan.topology.ranks, plan.topology.levels[0].bandwidth) == (4, 1.25e9)
    assert plan.about["memory_bytes"] == 40 * 2**30
    assert plan.predicted["replicas"] == [3, 1]


def test_a_sum_through_servers_is_remembered_for_the_simulator(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"

    hpcpipe(saved(tmp_path, chain(1, 1)), "--ranks", "2", "--allreduce", "server", "-o", str(path))

    assert load_plan(path).about["allreduce"] == "server"


# -- models with edges -------------------------------------------------------------------------------------


def test_layers_that_take_no_time_are_planned(tmp_path: Path) -> None:
    result = hpcpipe(saved(tmp_path, chain(0, 0, 0)), "--ranks", "2", "--latency", "0")

    assert result.exit_code == 0
    assert "any number of samples/s" in result.output
    assert "\nfewer ranks  1 rank (1) would be as fast\n" in result.output


def test_some_layers_that_take_no_time_are_planned(tmp_path: Path) -> None:
    table = found(saved(tmp_path, chain(0, 2, 0, 2, 0)), "--ranks", "2", "--straight")

    assert table["bottleneck_s"] == pytest.approx(2)


def test_a_single_layer_is_replicated(tmp_path: Path) -> None:
    table = found(saved(tmp_path, chain(3)), "--ranks", "3")

    assert (table["replicas"], table["seconds"]) == ([3], pytest.approx(1))


def test_more_ranks_than_layers_are_shared_out(tmp_path: Path) -> None:
    profile = saved(tmp_path, chain(1, 3))

    assert sum(found(profile, "--ranks", "8")["replicas"]) == 8
    assert "a straight pipeline over 8 ranks needs a layer for each" in refusal(
        profile, "--ranks", "8", "--straight"
    )


def test_layers_that_share_a_weight_are_in_one_stage(tmp_path: Path) -> None:
    # Without the weight that "b" and "d" share the best cut would be behind "c".
    free = chain(1, 1, 2, 1, 3)
    tied = saved(tmp_path, replace(free, shared=((1, 3),)))

    for ranks in ("2", "3", "5"):
        for stage in found(tied, "--ranks", ranks)["stages"]:
            assert ("b" in stage["layers"]) == ("d" in stage["layers"])
    options = ("--ranks", "2", "--straight", "--bandwidth", "1GB/s")
    assert [s["layers"] for s in found(tied, *options)["stages"]] == [["a", "b", "c", "d"], ["e"]]
    assert [s["layers"] for s in found(saved(tmp_path, free), *options)["stages"]] == [["a", "b", "c"], ["d", "e"]]


def test_one_rank_has_one_stage(tmp_path: Path) -> None:
    table = found(saved(tmp_path, chain(1, 3)), "--ranks", "1")

    assert (table["replicas"], table["stages"][0]["staleness"]) == ([1], 0)


def test_too_little_memory_ends_in_one_line_with_the_missing_bytes(tmp_path: Path) -> None:
    profile = saved(tmp_path, chain(1, 3, parameter_bytes=2**30))

    said = refusal(profile, "--ranks", "2", "--memory", "1GiB")

    assert said.startswith("hpcpipe: no plan fits into 1 GiB a rank: the tightest stage ")
    assert " too much; " in said


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"forward_s": -1}, 'layers[0] "a": forward_s: must be a number of seconds, 0 to 1e+09, got -1'),
        ({"backward_s": float("nan")}, "is no valid JSON: NaN is no number of JSON"),
        (
            {"output_bytes": 1.5},
            'layers[0] "a": output_bytes: must be a whole number of bytes, 0 to 2^53, got 1.5',
        ),
        ({"parameter_bytes": True}, 'layers[0] "a": parameter_bytes: must be a whole number of bytes'),
    ],
)
def test_a_wrong_number_in_the_profile_ends_in_one_line(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    table = profile_table(chain(1, 1))
    table["layers"][0].update(change)
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"format": "hpcpipe-profile", "version": 1, **table}))

    assert f"{path}: {says}" in refusal(str(path), "--ranks", "2")


def test_an_unreadable_profile_ends_in_one_line(tmp_path: Path) -> None:
    assert "none.json: no such profile" in refusal(str(tmp_path / "none.json"), "--ranks", "2")
    assert "cannot read the profile: Is a directory" in refusal(str(tmp_path), "--ranks", "2")


# -- topology ----------------------------------------------------------------------------------------------


def test_nodes_that_are_not_full_are_planned_for(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"

    hpcpipe(saved(tmp_path, chain(1, 1)), "--ranks", "5", "--ranks-per-node", "4", "-o", str(plan))

    levels = load_plan(plan).topology.levels
    assert [(level.name, level.size) for level in levels] == [("node", 4), ("network", 8)]


def test_ranks_that_fit_into_one_node_have_one_level(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    options = ("--ranks-per-node", "4", "--bandwidth", "12GB/s", "--bandwidth", "1GB/s", "-o", str(plan))

    hpcpipe(saved(tmp_path, chain(1, 1)), "--ranks", "4", *options)

    (level,) = load_plan(plan).topology.levels
    assert (level.size, level.bandwidth) == (4, 12e9)


def test_what_was_not_said_of_the_links_is_named(tmp_path: Path) -> None:
    profile = saved(tmp_path, chain(1, 1))

    assert "\nassumed: bandwidth and latency of the links; measure" in hpcpipe(profile, "--ranks", "2").output
    assert "\nassumed: latency of the links; " in hpcpipe(profile, "--ranks", "2", "--bandwidth", "1GB/s").output
    said = hpcpipe(profile, "--ranks", "2", "--bandwidth", "1GB/s", "--latency", "1us").output
    assert "assumed" not in said


def test_a_measured_topology_is_used(tmp_path: Path) -> None:
    topology = tmp_path / "topology.json"
    save_topology(nodes(4, 2), topology)
    profile, plan = saved(tmp_path, chain(1, 1)), str(tmp_path / "plan.json")

    result = hpcpipe(profile, "--ranks", "4", "--topology", str(topology), "-o", plan)

    assert load_plan(plan).topology == nodes(4, 2)
    assert "assumed" not in result.output
    assert "the topology joins 4 ranks" in refusal(profile, "--ranks", "5", "--topology", str(topology))
    said = refusal(profile, "--ranks", "4", "--topology", str(topology), "--bandwidth", "1GB/s")
    assert "--topology: has levels of its own" in said


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--bandwidth", "1GB/s", "--bandwidth", "1GB/s"], "--bandwidth: is needed 1 time (one level), got 2"),
        (["--ranks-per-node", "2", "--latency", "1us"], "--latency: is needed 2 times (inside a node and between"),
        (["--bandwidth", "fast"], "'fast' is no bandwidth: write it as"),
        (["--latency", "soon"], "'soon' is no time: write it as"),
        (["--memory", "much"], "'much' is no size: write it as"),
        (["--memory", "0"], "memory_bytes: must be a whole number of bytes, 1 to 2^53, got 0"),
        (["--microbatches", "2"], "microbatches = 2 needs one of "),
        (["--rows", "3"], "says itself that a pass has 10 rows"),
        (["-o", "none/plan.json"], "none/plan.json: there is no folder "),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_wrong_options_end_in_one_line(tmp_path: Path, options: list[str], says: str) -> None:
    assert says in refusal(saved(tmp_path, chain(1, 1, 1, 1)), "--ranks", "4", *options)


# -- how the plan will be run ------------------------------------------------------------------------------


def test_a_plan_is_for_the_run_that_was_profiled_unless_told(tmp_path: Path) -> None:
    about = {"schedule": "1f1b", "policy": None, "microbatches": 3}
    profile = saved(tmp_path, chain(1, 1, about=about))

    table = found(profile, "--ranks", "2")

    assert (table["schedule"], table["policy"], table["microbatches"]) == ("1f1b", None, 3)
    other = found(profile, "--ranks", "2", "--schedule", "pipedream", "--policy", "stash")
    assert (other["schedule"], other["policy"], other["microbatches"]) == ("pipedream", "stash", 1)


def test_synchronous_schedules_have_as_many_microbatches_as_ranks_unless_told(tmp_path: Path) -> None:
    profile = saved(tmp_path, chain(1, 1))

    assert found(profile, "--ranks", "2", "--schedule", "gpipe")["microbatches"] == 2
    assert found(profile, "--ranks", "2", "--schedule", "gpipe", "--microbatches", "5")["microbatches"] == 5


def test_a_minibatch_of_a_synchronous_schedule_counts_all_its_microbatches(tmp_path: Path) -> None:
    table = found(saved(tmp_path, chain(1, rows=10)), "--ranks", "1", "--schedule", "gpipe", "--microbatches", "4")

    assert (table["minibatches_per_s"], table["samples_per_s"]) == (pytest.approx(1 / 4), pytest.approx(10))


def test_an_option_can_come_from_the_environment(tmp_path: Path) -> None:
    result = hpcpipe(saved(tmp_path, chain(1, 1)), HPCPIPE_PLAN_RANKS="2")

    assert "on 2 ranks: " in result.output


# -- what is loaded ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (["--help"], ["torch", "mpi4py", "cupy", "h5py", "numpy", "pydantic"]),
        ([VGG16, "--ranks", "4"], ["torch", "mpi4py", "cupy", "h5py", "pydantic"]),
    ],
    ids=["help", "plan"],
)
def test_planning_loads_neither_torch_nor_mpi(arguments: list[str], heavy: list[str]) -> None:
    script = f"""
import sys
from hpcpipe.cli.main import hpcpipe
hpcpipe(["plan", *{arguments!r}], standalone_mode=False)
print(*[name for name in {heavy!r} if name in sys.modules], file=sys.stderr)
"""

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)

    assert (done.returncode, done.stderr.strip()) == (0, "")
