from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import load_file

from hpcpipe.checkpoint.digest import digest
from hpcpipe.checkpoint.layout import rank_name
from hpcpipe.checkpoint.sets import CheckpointSet, open_set
from hpcpipe.cli.checkpoint import checkpoint
from hpcpipe.errors import CheckpointError
from tests.unit.checkpoint_samples import layer_tree, same_bits, uncommit, write_set


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(checkpoint, [str(argument) for argument in arguments])


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run with two good sets and the leftovers of a third."""
    root = tmp_path / "checkpoints"
    write_set(root, 50, [layer_tree("a"), layer_tree("b")], {"run_id": "r7"})
    second = layer_tree("b") | {
        "stages/1/versions/98/b/weight": np.ones(3),
        "stages/1/versions/99/b/weight": np.ones(3),
        "stages/1/inflight/100/inputs/0": np.ones(3),
        "stages/1/inflight/101/inputs/0": np.ones(3),
        "stages/1/predictions/100/b/weight": np.ones(3),
    }
    write_set(root, 100, [layer_tree("a"), second], {"run_id": "r7", "model": {"name": "mlp"}})
    uncommit(write_set(root, 150, [layer_tree("a")]))
    return tmp_path


def _damage(run_folder: Path) -> None:
    path = run_folder / "checkpoints" / "step-0000000100" / rank_name(1)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_list_shows_all_sets_newest_first_and_which_count(run_folder: Path) -> None:
    done = _run("list", run_folder)
    assert done.exit_code == 0
    header, *rows = done.stdout.splitlines()
    assert header.split() == ["step", "ranks", "size", "age", "state"]
    assert [row.split()[0] for row in rows] == ["150", "100", "50"]
    assert rows[0].endswith("  not committed")
    assert rows[1].endswith("  committed")
    (run_folder / "checkpoints/step-0000000100" / rank_name(0)).unlink()
    assert "damaged: " in _run("list", run_folder).stdout

    sets = json.loads(_run("list", run_folder, "--json").stdout)["sets"]
    assert [(s["step"], s["ranks"], s["committed"], s["fault"] is None) for s in sets] == [
        (150, None, False, False),
        (100, 2, True, False),
        (50, 2, True, True),
    ]


def test_list_of_one_set_is_one_line(run_folder: Path) -> None:
    assert len(_run("list", run_folder / "checkpoints/step-0000000050").stdout.splitlines()) == 2


def test_show_tells_run_layers_versions_and_what_is_in_flight(run_folder: Path) -> None:
    done = _run("show", run_folder)
    assert done.exit_code == 0
    assert "step 100, 2 ranks" in done.stdout
    assert "run_id: r7" in done.stdout
    assert "layer b: rank 1, 18 parameters" in done.stdout
    assert "minibatches in flight 100 101, older versions 98 99 (staleness up to 2)" in done.stdout
    assert "passed over" in done.stderr

    shown = json.loads(_run("show", run_folder, "--json").stdout)
    assert shown["meta"] == {"run_id": "r7", "model": {"name": "mlp"}}
    assert [layer["name"] for layer in shown["layers"]] == ["a", "b"]
    (stage,) = shown["stages"]
    assert (stage["stage"], stage["versions"], stage["inflight"], stage["predictions"], stage["staleness"]) == (
        "1",
        [98, 99],
        [100, 101],
        [100],
        2,
    )


def test_show_digest_ends_with_the_overall_line(run_folder: Path) -> None:
    expected = digest(open_set(run_folder / "checkpoints/step-0000000100"))
    lines = _run("show", run_folder, "--digest").stdout.splitlines()
    assert lines[-1] == f"overall {expected.overall}"
    assert lines[-1 - len(expected.tensors) : -1] == [
        f"{value}  {path}" for path, value in expected.tensors.items()
    ]
    shown = json.loads(_run("show", run_folder, "--digest", "--json").stdout)
    assert shown["digest"] == {"overall": expected.overall, "tensors": expected.tensors}


def test_show_digest_falls_back_to_the_newest_set_that_verifies(run_folder: Path) -> None:
    _damage(run_folder)
    done = _run("show", run_folder, "--digest")
    assert "step 50," in done.stdout
    assert rank_name(1) in done.stderr


def test_verify_says_ok_for_every_whole_set_and_ignores_leftovers(run_folder: Path) -> None:
    done = _run("verify", run_folder)
    assert done.exit_code == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["ok", "ok"]
    assert done.stderr.startswith("ignored: ")


def test_verify_ends_with_2_and_a_line_for_each_fault(run_folder: Path) -> None:
    _damage(run_folder)
    (run_folder / "checkpoints/step-0000000050" / rank_name(0)).unlink()
    done = _run("verify", run_folder)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 3

    sets = json.loads(_run("verify", run_folder, "--json").stdout)["sets"]
    assert [len(s["faults"]) for s in sets] == [1, 1, 1]


def test_verify_takes_a_set_that_a_run_retires_meanwhile_for_no_fault(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oldest = run_folder / "checkpoints" / "step-0000000050"
    faults = CheckpointSet.faults

    def retired_first(found: CheckpointSet) -> list[str]:
        if found.path == oldest:
            shutil.rmtree(oldest)
        return faults(found)

    monkeypatch.setattr(CheckpointSet, "faults", retired_first)

    done = _run("verify", run_folder)

    assert done.exit_code == 0
    assert f"ignored: {oldest}: was removed while it was read" in done.stderr
    assert "step 100" in done.stdout


def test_verify_of_leftovers_alone_is_no_success(run_folder: Path) -> None:
    done = _run("verify", run_folder / "checkpoints/step-0000000150")
    assert done.exit_code == 2


def test_export_writes_the_newest_set_under_the_model_s_names(run_folder: Path) -> None:
    output = run_folder / "model.safetensors"
    done = _run("export", run_folder, "-o", output)
    assert done.exit_code == 0
    assert done.stdout == f"{output}: 8 tensors of step 100\n"
    state = load_file(output)
    assert same_bits(state["a.weight"], layer_tree("a")["layers/a/parameters/weight"])
    assert same_bits(state["b.running_mean"], layer_tree("b")["layers/b/buffers/running_mean"])


@pytest.mark.parametrize("command", [["list"], ["show"], ["verify"], ["export", "-o", "x.safetensors"]], ids=str)
def test_a_folder_without_checkpoints_is_one_line_with_exit_code_2(tmp_path: Path, command: list[str]) -> None:
    for where in (tmp_path, tmp_path / "none"):
        done = _run(*command, where)
        assert isinstance(done.exception, CheckpointError)
        assert done.exception.exit_code == 2
        assert "\n" not in str(done.exception)
        assert str(where) in str(done.exception)


def test_an_output_that_cannot_be_written_is_one_line(run_folder: Path) -> None:
    done = _run("export", run_folder, "-o", run_folder / "none" / "m.safetensors")
    assert isinstance(done.exception, CheckpointError)
    assert "cannot be written (No such file or directory)" in str(done.exception)


def test_what_a_set_says_of_itself_cannot_command_the_terminal(tmp_path: Path) -> None:
    meta = {"\x1b]0;owned\x07": "\x1b[2J\ud800", "deep": {"a": "\x1b[31m"}, "long": "\x9b" * 500}
    directory = write_set(tmp_path, 1, [layer_tree("a")], meta)
    done = _run("show", directory)
    assert done.exit_code == 0
    assert all(line.isprintable() for line in done.stdout.splitlines())
    assert json.loads(_run("show", directory, "--json").stdout)["meta"] == meta
