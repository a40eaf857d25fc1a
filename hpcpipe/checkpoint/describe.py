"""What a set holds, from its indexes alone: layers and where they are, live versions, minibatches in flight.

It reads no array; the words are those of the paths that the engine writes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hpcpipe.checkpoint.sets import CheckpointSet, layer_kind
from hpcpipe.errors import CheckpointError


@dataclass(kw_only=True)
class Layer:
    """One layer: the rank that holds it, numbers in its parameters, bytes of everything stored under its name."""

    name: str
    rank: int
    parameters: int = 0
    nbytes: int = 0


@dataclass(kw_only=True)
class Stage:
    """What a stage had in flight, as one file has it: minibatches, older versions, predictions for forwards.

    A stage of several `replicas` makes one update from so many minibatches; the file has `replicas_here` of them.
    """

    stage: str
    rank: int
    replicas: int = 1
    replicas_here: int = 1
    inflight: set[int] = field(default_factory=set)
    versions: set[int] = field(default_factory=set)
    predictions: set[int] = field(default_factory=set)
    nbytes: int = 0

    def staleness(self, step: int) -> int:
        """Updates between the newest weights (`step`) and the oldest that minibatches in flight or to come use."""
        in_flight_at_each = -(-len(self.inflight) // self.replicas_here)
        return max((in_flight_at_each, *(-((version - step) // self.replicas) for version in self.versions)))


def describe(checkpoint: CheckpointSet) -> tuple[list[Layer], list[Stage]]:
    """Layers in order of rank, and for each rank the stages it held.

    Raises:
        CheckpointError: a rank file is missing, its index does not verify, or it is not as the engine writes it.
    """
    layers: dict[tuple[int, str], Layer] = {}
    stages: dict[tuple[int, str], Stage] = {}
    for rank in range(checkpoint.ranks):
        for path, entry in checkpoint.index(rank).entries.items():
            parts = path.split("/")
            if kind := layer_kind(path):
                layer = layers.setdefault((rank, parts[1]), Layer(name=parts[1], rank=rank))
                layer.nbytes += entry.nbytes
                layer.parameters += math.prod(entry.shape) if kind == "parameters" else 0
            elif len(parts) > 3 and parts[0] == "stages" and parts[3].isdecimal():
                if (stage := stages.get((rank, parts[1]))) is None:
                    stage = stages[rank, parts[1]] = _stage(checkpoint, rank, parts[1])
                stage.nbytes += entry.nbytes
                held = {"inflight": stage.inflight, "versions": stage.versions, "predictions": stage.predictions}
                held.get(parts[2], set()).add(int(parts[3]))
    return list(layers.values()), list(stages.values())


def _stage(checkpoint: CheckpointSet, rank: int, name: str) -> Stage:
    metas = checkpoint.index(rank).meta.get("stages")
    found = metas.items() if isinstance(metas, dict) else ()
    here = [meta for key, meta in found if key.partition(".")[0] == name and isinstance(meta, dict)]
    replicas = here[0].get("replicas") if here else 1
    if type(replicas) is not int or replicas < 1:
        raise CheckpointError(f"{checkpoint.path}: file {rank} does not say how many replicas stage {name} has")
    return Stage(stage=name, rank=rank, replicas=replicas, replicas_here=max(1, len(here)))
