"""Named runs that every way of training must get right, as sections laid over `runs.BASE`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Sections = Mapping[str, Mapping[str, Any]]

ROWS = {"name": "synthetic", "shape": (16,), "classes": 5, "rows": 200, "eval_data_rows": 40, "batch": 8}
IMAGES = {"name": "digits", "flat": False, "batch": 12}
TOKENS = {"name": "synthetic", "shape": (10,), "vocab": 13, "rows": 120, "eval_data_rows": 12, "batch": 5}
MLP = {"name": "mlp", "hidden": (9, 8, 8, 7, 8, 9, 8), "activation": "tanh"}

POLICIES: dict[str, Mapping[str, str]] = {
    "stash": {"policy": "stash"},
    "vertical_sync": {"policy": "vertical_sync"},
    "none": {"policy": "none"},
    "round_trip": {"policy": "spectrain", "target": "round_trip"},
    "local": {"policy": "spectrain", "target": "local"},
    "damped": {"policy": "spectrain", "target": "damped"},
}

OPTIMIZERS: dict[str, Mapping[str, Any]] = {
    "sgd": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
    "adamw": {"name": "adamw", "lr": 0.01},
}

NETS: dict[str, Sections] = {
    "mlp": {"model": MLP, "data": ROWS},
    "digits": {},
    "batchnorm and dropout": {"model": {"name": "tests.oracle.nets:build_convnet"}, "data": IMAGES},
    "gpt": {
        "model": {"name": "gpt", "width": 12, "heads": 2, "depth": 2, "dropout": 0.1},
        "data": TOKENS,
        "optimizer": OPTIMIZERS["adamw"],
    },
    "several tensors": {"model": {"name": "tests.oracle.nets:build_several"}, "data": ROWS},
    "in place": {"model": {"name": "tests.oracle.nets:build_in_place"}, "data": ROWS},
    "aliases of messages": {"model": {"name": "tests.oracle.nets:build_aliases"}, "data": ROWS},
    "two inputs and two outputs": {
        "model": {"name": "tests.oracle.nets:build_odd"},
        "data": {"name": "tests.oracle.data:build_scaled", "batch": 8},
        "loss": {"name": "tests.oracle.data:regularised"},
    },
    "parameters without gradient": {"model": {"name": "tests.oracle.nets:build_sometimes"}, "data": ROWS},
    "tied within a layer": {"model": {"name": "tests.oracle.nets:build_tied"}, "data": ROWS},
}
"""Nets of at least four layers with data that fit."""

GROUPS = (
    {"match": "*.bias", "weight_decay": 0.0, "lr_scale": 2.0},
    {"match": "output.*", "lr_scale": 0.5, "weight_decay": 0.1},
)

SETTINGS: dict[str, Sections] = {
    "two epochs with short last minibatches": {
        "run": {"epochs": 2, "max_steps": None},
        "data": {**ROWS, "rows": 92},
    },
    "a falling learning rate": {"lr_schedule": {"name": "linear", "end_factor": 0.2}},
    "weight decay and parameter groups": {
        "optimizer": {"name": "sgd", "lr": 0.04, "momentum": 0.8, "weight_decay": 0.02, "groups": GROUPS}
    },
    "decoupled decay and parameter groups": {
        "optimizer": {"name": "adamw", "lr": 0.01, "weight_decay": 0.2, "groups": GROUPS},
        "lr_schedule": {"name": "linear", "end_factor": 0.1},
    },
    "nesterov": {"optimizer": {"name": "sgd", "lr": 0.03, "momentum": 0.9, "nesterov": True}},
    "dampening and ascent": {
        "optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9, "dampening": 0.3, "maximize": True}
    },
    "float64": {"run": {"dtype": "float64"}},
    "bfloat16": {"run": {"dtype": "bfloat16"}, "optimizer": OPTIMIZERS["adamw"]},
}
"""Ways to train the MLP on rows."""


def laid_over(*parts: Sections) -> dict[str, dict[str, Any]]:
    """Sections merged key by key, later ones on top; one that names itself replaces what was there."""
    merged: dict[str, dict[str, Any]] = {}
    for part in parts:
        for name, table in part.items():
            merged[name] = dict(table) if "name" in table else {**merged.get(name, {}), **table}
    return merged


def case(policy: str, stages: int | None = None, *parts: Sections, steps: int = 17) -> dict[str, dict[str, Any]]:
    """A run of `steps` minibatches under one of `POLICIES`; `stages` is None for as many as there are ranks."""
    pipeline = {**POLICIES[policy], **({} if stages is None else {"stages": stages})}
    return laid_over({"run": {"max_steps": steps}}, *parts, {"pipeline": pipeline})
