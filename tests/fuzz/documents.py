"""Files other than checkpoints that hpcpipe reads, as a user would write them, and what reads each of them."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import numpy as safetensors_numpy

from hpcpipe.config import load_run
from hpcpipe.datasets.idx import read_idx
from hpcpipe.engine.restore import start_from_weights
from hpcpipe.planning.plan_file import PlanFile, PlannedStage, load_plan, save_plan
from hpcpipe.planning.profile import load_profile, save_profile
from hpcpipe.planning.topology import load_topology, save_topology
from tests.unit.planning_cases import PROFILES, chain, nodes

RUN = """
[run]
seed = 5
max_steps = 30
threads = 1
stop_signals = ["SIGUSR1"]
[model]
name = "mlp"
hidden = [12, 11, 10]
[data]
name = "digits"
batch = 16
[pipeline]
stages = 2
replicas = [2, 1]
policy = "spectrain"
[optimizer]
name = "sgd"
lr = 5e-2
momentum = 0.9
[[optimizer.groups]]
match = "*.bias"
weight_decay = 0.0
[lr_schedule]
name = "cosine"
[checkpoint]
every = 200
"""


class Document(NamedTuple):
    """A kind of file: what it is called, one that is right, and what reads it."""

    name: str
    content: bytes
    read: Callable[[Path], object]


def make_documents(folder: Path) -> dict[str, Document]:
    """One document of each kind by the name of the kind."""
    found = [
        Document("run.toml", RUN.encode(), load_run),
        Document("graph.txt", (PROFILES / "vgg16.txt").read_bytes(), load_profile),
        Document("images-idx", b"\0\0\x08\x03" + bytes((0, 0, 0, 2) * 3) + bytes(range(8)), read_idx),
        Document("images.gz", gzip.compress(b"\0\0\x08\x01\0\0\0\x20" + bytes(32)), read_idx),
        Document("weights.safetensors", _safetensors(), lambda path: start_from_weights({}, path)),
        *_planning(folder),
    ]
    return {document.name: document for document in found}


def _planning(folder: Path) -> list[Document]:
    profile, topology = chain(1.0, 2.0, 3.0, about={"batch": 10}), nodes(2, 1)
    plan = PlanFile(
        stages=(PlannedStage(("a", "b"), (0,)), PlannedStage(("c",), (1,))),
        schedule="pipedream",
        policy="stash",
        microbatches=1,
        profile=profile,
        topology=topology,
    )
    kinds: Mapping[str, tuple[Any, Callable[..., None], Callable[[Path], object]]] = {
        "profile.json": (profile, save_profile, load_profile),
        "topology.json": (topology, save_topology, load_topology),
        "plan.json": (plan, save_plan, load_plan),
    }
    found = []
    for name, (value, save, load) in kinds.items():
        save(value, folder / name)
        found.append(Document(name, (folder / name).read_bytes(), load))
    return found


def _safetensors() -> bytes:
    return bytes(
        safetensors_numpy.save({"a.weight": np.ones((3, 2), np.float32), "a.bias": np.zeros(3, np.float32)})
    )
