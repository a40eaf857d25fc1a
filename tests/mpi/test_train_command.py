"""`hpcpipe train` as a user runs it: what it says, what it leaves, and what comes out of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hpcpipe.config import load_run
from hpcpipe.datasets.build import build_dataset
from hpcpipe.models.build import build_layers
from hpcpipe.models.layers import make_layers
from tests.mpi.launch import Result, run, run_alone

HPCPIPE = ["-m", "hpcpipe"]
RUN = """
[run]
epochs = 2
trace = true
[model]
name = "mlp"
hidden = [32, 32, 32]
batchnorm = true
[data]
name = "digits"
batch = 64
[pipeline]
policy = "spectrain"
[optimizer]
name = "sgd"
lr = 0.05
[checkpoint]
every = 10
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A run on four ranks: its run file's folder, and how it ended."""
    folder = tmp_path_factory.mktemp("train")
    (folder / "run.toml").write_text(RUN)
    result = run(
        HPCPIPE,
        4,
        "train",
        str(folder / "run.toml"),
        timeout_s=120,
        environment={"HPCPIPE_TRAIN_OUT": str(folder / "out")},
    )
    assert result.rc == 0, str(result)
    return folder, result


def test_the_plan_the_staleness_and_the_transport_are_said_once(finished: tuple[Path, Result]) -> None:
    _, result = finished
    lines = result.stderr.splitlines()

    assert all(line.startswith("hpcpipe: ") for line in lines), result.stderr
    assert sum("schedule pipedream, policy spectrain, target round_trip" in line for line in lines) == 1
    assert sum(line.startswith("hpcpipe: transport: host buffers over") for line in lines) == 1
    table = [line.split()[-4:] for line in lines if line.endswith("ahead")]
    assert table == [
        ["3", "3,", "0", "ahead"],
        ["2", "2,", "0", "ahead"],
        ["1", "2,", "1", "ahead"],
        ["0", "1,", "1", "ahead"],
    ]


def test_an_option_from_the_environment_counts(finished: tuple[Path, Result]) -> None:
    folder, _ = finished

    assert (folder / "out" / "metrics.jsonl").exists()


def test_the_summary_names_every_rank_and_its_stage(finished: tuple[Path, Result]) -> None:
    folder, _ = finished
    summary = json.loads((folder / "out" / "summary.json").read_text())

    assert summary["steps"] == 2 * 23
    assert summary["checkpoint_step"] == 46
    assert [rank["rank"] for rank in summary["ranks"]] == [0, 1, 2, 3]
    stages = [rank["stages"][0] for rank in summary["ranks"]]
    assert [stage["staleness"] for stage in stages] == [3, 2, 1, 0]
    assert [name for stage in stages for name in stage["layers"]]
    assert all(0 < rank["busy_fraction"] <= 1 for rank in summary["ranks"])
    assert all(rank["bytes_sent"] > 0 for rank in summary["ranks"])


def test_a_timeline_of_all_ranks_is_written_on_request(finished: tuple[Path, Result]) -> None:
    folder, _ = finished
    events = json.loads((folder / "out" / "trace.json").read_text())["traceEvents"]

    assert {event["pid"] for event in events} == {0, 1, 2, 3}
    assert sum(event["name"] == "U45" for event in events) == 4


def test_the_run_file_as_resolved_stands_in_the_run_folder(finished: tuple[Path, Result]) -> None:
    folder, _ = finished

    resolved = load_run(folder / "out" / "run.toml")

    assert resolved.optimizer.lr == 0.05
    assert resolved.run.out == str(folder / "out")


def test_an_exported_model_gives_plain_torch_the_same_accuracy(
    finished: tuple[Path, Result], tmp_path: Path
) -> None:
    folder, _ = finished
    exported = tmp_path / "model.safetensors"
    done = run_alone(HPCPIPE, "checkpoint", "export", str(folder / "out"), "-o", str(exported))
    assert done.rc == 0, str(done)

    config = load_run(folder / "run.toml")
    data = build_dataset(config.data, config.run.seed)
    specs = build_layers(config.model, config.run.seed, data.describe())
    model = torch.nn.Sequential()
    for spec, layer in zip(specs, make_layers(specs, config.run.seed), strict=True):
        model.add_module(spec.name, layer)
    model.load_state_dict(load_file(exported))
    model.eval()
    hits = rows = 0
    with torch.no_grad():
        for batch in range(data.eval_batches):
            hits += int((model(*data.eval_inputs(batch)).argmax(-1) == data.eval_targets(batch)).sum())
            rows += data.eval_rows(batch)

    summary = json.loads((folder / "out" / "summary.json").read_text())
    assert hits / rows == summary["figures"]["eval_accuracy"]


def test_an_exception_in_a_layer_ends_all_ranks_soon_with_its_traceback_last(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "import torch\n"
        "class Broken(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        raise ValueError('this layer is broken')\n"
        "def build():\n"
        "    return [('a', torch.nn.Linear(64, 16)), ('b', Broken()), ('c', torch.nn.Linear(16, 10))]\n"
    )
    text = RUN.split("[model]")[0] + '[model]\nname = "broken:build"\n[data]' + RUN.split("[data]")[1]
    (tmp_path / "run.toml").write_text(text)

    result = run(HPCPIPE, 3, "train", "run.toml", "--out", "out", timeout_s=60, cwd=tmp_path)

    assert result.rc == 1, str(result)
    ours = [line for line in result.stderr.splitlines() if line.startswith(("hpcpipe: ", "[rank "))]
    assert ours[-1] == "[rank 1] ValueError: this layer is broken", str(result)
    assert result.seconds < 40, str(result)
