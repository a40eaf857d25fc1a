"""Runs that leave a checkpoint with minibatches in flight, for other runs to go on from anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcpipe.checkpoint.layout import set_name
from hpcpipe.config import RunConfig
from tests.oracle.runs import configured

CUT = 8
STEPS = 20

NET = {"name": "mlp", "hidden": (12, 11, 10, 9), "activation": "tanh", "dropout": 0.2, "batchnorm": True}
SPECTRAIN = {"stages": 4, "policy": "spectrain"}
STASH = {"stages": 4, "policy": "stash"}
REPLICATED = {"replicas": (1, 2, 1), "policy": "spectrain"}


def moving(out: Path, pipeline: Mapping[str, Any], **sections: Mapping[str, Any]) -> RunConfig:
    """A run of `STEPS` minibatches with a checkpoint every `CUT`; nothing in it depends on where it ends."""
    given = {
        "run": {"max_steps": STEPS, "progress": "lines", **sections.get("run", {})},
        "model": sections.get("model", NET),
        "data": {"name": "synthetic", "batch": 16, "rows": 1024},
        "lr_schedule": {"name": "linear", "end_factor": 0.2, "total": 400},
        "pipeline": {"policy": "spectrain", **pipeline},
        "checkpoint": {"every": CUT, "keep_last": 99, **sections.get("checkpoint", {})},
    }
    return configured(out, **given)


def cut_of(out: Path, step: int = CUT) -> Path:
    """The folder of the checkpoint at `step`."""
    return out / "checkpoints" / set_name(step)
