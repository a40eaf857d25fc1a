"""`hpcpipe schedule show` and `verify`, and that they load neither torch nor MPI."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hpcpipe.cli import main as command_line
from hpcpipe.schedule.verify import ScheduleError


def hpcpipe(*arguments: str, color: bool = False, **environment: str) -> Result:
    return CliRunner().invoke(command_line.hpcpipe, ["schedule", *arguments], env=environment, color=color)


def test_show_draws_the_schedule_its_legend_and_its_figures() -> None:
    result = hpcpipe("show", "--stages", "3", "--minibatches", "4", "--policy", "stash", COLUMNS="80")

    assert result.exit_code == 0
    head, drawing, legend, table = result.output.split("\n\n")
    assert head == "pipedream, 3 stages on 3 ranks, 4 minibatches, stash"
    assert drawing.splitlines()[1] == "stage 0  F0 F1 F2  ·  · B0 F3 B1  · B2  · B3"
    assert legend.startswith("F3 forward of minibatch 3, B3 backward")
    assert len(table.splitlines()) == 4


@pytest.mark.parametrize("columns", [50, 120])
def test_show_keeps_to_the_width_of_the_terminal(columns: int) -> None:
    result = hpcpipe("show", "--minibatches", "100", COLUMNS=str(columns))

    drawing = result.output.split("\n\n")[1].splitlines()[:-1]
    assert max(map(len, drawing)) <= columns


def test_colours_appear_on_a_terminal_only() -> None:
    assert "\x1b[" not in hpcpipe("show").output
    painted = hpcpipe("show", color=True).output
    assert "\x1b[36m\x1b[1mF0\x1b[0m" in painted
    assert "\x1b[33m\x1b[1mB0\x1b[0m" in painted


def test_show_draws_a_run_of_any_length_at_once() -> None:
    assert hpcpipe("show", "--minibatches", str(10**9)).exit_code == 0


def test_synchronous_schedules_have_as_many_microbatches_as_stages_unless_told() -> None:
    assert "of 3 microbatches" in hpcpipe("show", "--schedule", "gpipe", "--stages", "3").output
    assert "of 5 microbatches" in hpcpipe("show", "--schedule", "1f1b", "--microbatches", "5").output


def test_show_lists_every_action_as_json() -> None:
    result = hpcpipe("show", "--stages", "2", "--minibatches", "3", "--json")

    found: dict[str, Any] = json.loads(result.output)
    assert found["schedule"] == "pipedream"
    assert found["ranks"] == [[0], [1]]
    first, second = found["actions"]
    assert first[0] == {
        "op": "forward",
        "stage": 0,
        "replica": 0,
        "minibatch": 0,
        "microbatch": 0,
        "version": 0,
        "distance": 0,
    }
    assert [action["op"] for action in second[:4]] == [
        "receive_activation",
        "forward",
        "backward",
        "send_gradient",
    ]
    predictions = [p for action in first for p in action.get("predictions", [])]
    assert {"role": "forward", "minibatch": 2, "version": 1, "distance": 1} in predictions


def test_verify_prints_a_line_for_each_proof() -> None:
    result = hpcpipe("verify", "--minibatches", "6")

    assert result.exit_code == 0
    assert "no deadlock: 4 ranks" in result.output
    assert "every send received: 36 messages on 6 channels" in result.output
    assert "cuts: all 6 checked" in result.output


@pytest.mark.parametrize("schedule", ["pipedream", "gpipe", "1f1b"])
@pytest.mark.parametrize("minibatches", ["0", "1", "2", "3"])
def test_verify_ends_with_fewer_minibatches_than_stages(schedule: str, minibatches: str) -> None:
    result = hpcpipe("verify", "--schedule", schedule, "--minibatches", minibatches)

    assert result.exit_code == 0


def test_verify_proves_stages_spread_over_ranks_with_evaluations_and_drains() -> None:
    options = "--stages 5 --ranks 2 --evaluate-every 3 --evaluation-batches 2 --drain-every 6 --minibatches 20"

    result = hpcpipe("verify", *options.split(), "--json")

    assert result.exit_code == 0
    found = json.loads(result.output)
    assert found["proved"] is True
    assert found["ranks"] == [[0, 1, 2], [3, 4]]
    assert found["cuts_checked"] == 20
    assert found["messages"] == sum(channel["messages"] for channel in found["channels"])
    assert [stage["evaluations"] for stage in found["per_stage"]] == [12] * 5


def test_the_figures_of_a_proof_are_in_the_json() -> None:
    found = json.loads(hpcpipe("verify", "--minibatches", "10", "--policy", "stash", "--json").output)

    stage = found["per_stage"][1]
    assert (stage["warm_up"], stage["in_flight"], stage["peak_versions"]) == (2, 3, 3)
    assert stage["staleness"] == [0, 1, 2, 2, 2, 2, 2, 2, 2, 2]
    activations = {
        "source": 0,
        "source_replica": 0,
        "destination": 1,
        "destination_replica": 0,
        "kind": "activation",
    }
    assert {**activations, "messages": 10, "ring_depth": 4} in found["channels"]


def test_replicas_are_shown_and_verified() -> None:
    shown = hpcpipe("show", "--replicas", "3,1", "--minibatches", "6", COLUMNS="80").output
    assert shown.startswith("pipedream, 2 stages (3, 1 replicas) on 4 ranks, 6 minibatches")
    assert "\nstage 0 replica 2" in shown
    assert "replicas  warm-up" in shown

    found = json.loads(hpcpipe("verify", "--replicas", "3,1", "--minibatches", "9", "--json").output)
    assert found["proved"] is True
    assert (found["stages"], found["replicas"], found["ranks"]) == (2, [3, 1], [[0], [0], [0], [1]])
    assert found["cuts_checked"] == 3
    assert [(place["stage"], place["replica"]) for place in found["per_stage"]] == [(0, 0), (0, 1), (0, 2), (1, 0)]


def test_what_replicas_do_is_listed_as_json() -> None:
    found = json.loads(hpcpipe("show", "--replicas", "2,1", "--minibatches", "2", "--json").output)

    second = found["actions"][1]
    assert {action["replica"] for action in second} == {1}
    assert "reduce" in [action["op"] for action in second]
    assert [action["peer_replica"] for action in found["actions"][2] if action["op"] == "send_gradient"] == [0, 1]


@pytest.mark.parametrize("as_json", [False, True])
def test_a_fault_is_printed_and_ends_with_code_1(as_json: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(*_: object) -> None:
        raise ScheduleError("deadlock: nobody moves", stage=2)

    monkeypatch.setattr("hpcpipe.cli.schedule.verify", faulty)

    result = hpcpipe("verify", *(["--json"] if as_json else []))

    assert result.exit_code == 1
    if as_json:
        found = json.loads(result.output)
        assert (found["proved"], found["fault"]) == (False, "deadlock: nobody moves")
    else:
        assert result.output.endswith("\nfault: deadlock: nobody moves\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--ranks", "5"], "4 stages can be spread over 1 to 4 ranks, got 5"),
        (["--microbatches", "2"], "microbatches = 2 needs one of 1f1b, gpipe"),
        (["--replicas", "2,1", "--ranks", "2"], "--ranks and --replicas exclude each other"),
        (["--replicas", "2,one"], "give one number a stage with commas between, as 3,1"),
        (["--replicas", "2,0"], "a stage needs at least 1 replica"),
        (["--replicas", "2,1", "--stages", "3"], "count those of 2 stages, but there are 3"),
    ],
)
@pytest.mark.parametrize("command", ["show", "verify"])
def test_wrong_numbers_end_in_one_line_and_code_2(
    command: str,
    arguments: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["hpcpipe", "schedule", command, *arguments])

    with pytest.raises(SystemExit) as end:
        command_line.main()

    assert end.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("hpcpipe: ")
    assert says in output.err
    assert output.err.count("\n") == 1


def test_an_option_can_come_from_the_environment() -> None:
    assert hpcpipe("show", HPCPIPE_SCHEDULE_SHOW_STAGES="2").output.startswith("pipedream, 2 stages")


@pytest.mark.parametrize(
    "program",
    [
        "import hpcpipe",
        "run('--help')",
        "run('schedule', '--help')",
        "run('schedule', 'show')",
        "run('schedule', 'verify')",
    ],
)
def test_looking_loads_neither_torch_nor_mpi_nor_cupy(program: str) -> None:
    """A login node has no GPU and often no MPI that could be initialised."""
    script = f"""
import sys
def run(*arguments):
    from hpcpipe.cli.main import hpcpipe
    hpcpipe(arguments, standalone_mode=False)
{program}
heavy = ["torch", "mpi4py.MPI", "cupy", "h5py", "numpy"]
print(*[name for name in heavy if name in sys.modules], file=sys.stderr)
"""

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)

    assert (done.returncode, done.stderr.strip()) == (0, "")
