"""Runs of the engine as tests want them: a run file from a few tables, the run, and what it left behind.

Everything is read from what a user would read (the last checkpoint, metrics.jsonl, summary.json), so a comparison
covers the whole way to the disk.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpcpipe.checkpoint.sets import find_sets, open_set
from hpcpipe.config import RunConfig, parse_run
from hpcpipe.engine.snapshot import to_tensor
from hpcpipe.engine.train import TrainOptions, train
from tests.oracle.lone_world import LoneWorld

Tables = Mapping[str, Mapping[str, Any]]

BASE: Tables = {
    "run": {
        "seed": 5,
        "log_every": 1,
        "threads": 1,
        "device": "cpu",
        "progress": "off",
        "stop_signals": (),
    },
    "model": {"name": "mlp", "hidden": (12, 11, 10), "activation": "tanh"},
    "data": {"name": "digits", "batch": 16},
    "pipeline": {"policy": "stash"},
    "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9, "backend": "torch"},
    "eval": {"at_end": False, "every": 10**6},
}
"""A tanh MLP of four layers on digits, without evaluation."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run ends with; names are `<layer>.<parameter>`.

    `losses` are those of each minibatch in order, `state` is optimizer state by name of the state.
    """

    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    state: dict[str, dict[str, Tensor]]
    losses: list[float]
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)


def configured(directory: Path | str = "nowhere", **sections: Mapping[str, Any]) -> RunConfig:
    """`BASE` with some sections changed; a section with a `name` of its own replaces the one of `BASE`."""
    merged = {
        name: dict(sections[name])
        if "name" in sections.get(name, {})
        else {**BASE.get(name, {}), **sections.get(name, {})}
        for name in {**BASE, **sections}
    }
    if merged["optimizer"].get("backend") is None:
        merged["optimizer"]["backend"] = "torch"
    merged["run"] = {**BASE["run"], **merged["run"], "out": str(directory)}
    return parse_run(merged)


def write_run_file(config: RunConfig) -> Path:
    """The run file of `config` beside its folder."""
    out = Path(config.run.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    path = out.with_suffix(".toml")
    path.write_text(config.to_toml())
    return path


def run_alone(config: RunConfig) -> Outcome:
    """Run all stages in this process, without MPI."""
    assert train(LoneWorld(), TrainOptions(run_file=str(write_run_file(config)))) == 0
    return outcome_of(Path(config.run.out))


def failure_of(config: RunConfig, kind: type[Exception]) -> str:
    """What a run says that ends with an exception of this kind."""
    try:
        train(LoneWorld(), TrainOptions(run_file=str(write_run_file(config))))
    except kind as error:
        return str(error)
    raise AssertionError(f"the run ended without {kind.__name__}")


def outcome_of(directory: Path) -> Outcome:
    """What a finished run left in its folder."""
    held = held_by(find_sets(directory / "checkpoints")[0].path)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return replace(
        held,
        losses=[line["loss"] for line in lines if "loss" in line],
        evaluations={line["step"]: line["evaluation"] for line in lines if "evaluation" in line},
        summary=json.loads((directory / "summary.json").read_text()),
    )


def held_by(path: Path, buffers: str = "buffers") -> Outcome:
    """What one checkpoint holds, without losses; `buffers_next` are those that another plan goes on with."""
    found = open_set(path)
    held = Outcome(weights={}, buffers={}, state={}, losses=[])
    for layer in found.layers:
        part = found.read_layer(layer)
        for stored, array in part.tree.items():
            tensor = to_tensor(array, stored in part.bf16)
            kind, _, own = stored.partition("/")
            if kind == "parameters":
                held.weights[f"{layer}.{own}"] = tensor
            elif kind == buffers:
                held.buffers[f"{layer}.{own}"] = tensor
            elif kind == "optimizer":
                name, _, own = own.partition("/")
                held.state.setdefault(name, {})[f"{layer}.{own}"] = tensor
    return held


def assert_same(found: Outcome, expected: Outcome) -> None:
    """Weights, buffers, optimizer state and losses are equal to the bit."""
    assert found.losses == expected.losses
    assert_equal(found.weights, expected.weights)
    assert_equal(found.buffers, expected.buffers)
    assert found.state.keys() == expected.state.keys()
    for name, tensors in found.state.items():
        assert_equal(tensors, expected.state[name])


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The same names and, to the bit, the same numbers."""
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        other = expected[name]
        assert tensor.dtype == other.dtype, name
        assert torch.equal(tensor, other), f"{name} differs by up to {(tensor - other).abs().max()}"


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], **tolerance: float) -> None:
    """The same names and, within `tolerance` (as torch.testing.assert_close takes it), the same numbers."""
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(
            tensor, expected[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )
