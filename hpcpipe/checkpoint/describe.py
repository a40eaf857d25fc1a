"""What a set holds, from its indexes alone: layers and where they are, live versions, minibatches in flight.

It reads no array; the words are those of the paths that the engine writes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hpcpipe.checkpoint.sets import CheckpointSet, layer_kind


@dataclass(kw_only=True)
class Layer:
    """One layer: the rank that holds it, numbers in its parameters, bytes of everything stored under its name."""

    name: str
    rank: int
    parameters: int = 0
    nbytes: int = 0


@dataclass(kw_only=True)
class Stage:
    """What a rank's share of a stage had in flight: minibatches, older weight versions, predictions for forwards.

    A stage with several `replicas` makes one update from so many minibatches.
    """

    stage: str
    rank: int
    replicas: int = 1
    inflight: set[int] = field(default_factory=set)
    versions: set[int] = field(default_factory=set)
    predictions: set[int] = field(default_factory=set)
    nbytes: int = 0

    def staleness(self, step: int) -> int:
        """Updates between the newest weights (`step`) and the oldest that minibatches in flight or to come use."""
        return max((len(self.inflight), *(-((version - step) // self.replicas) for version in self.versions)))


def describe(checkpoint: CheckpointSet) -> tuple[list[Layer], list[Stage]]:
    """Layers in order of rank, and for each rank the stages it held.

    Raises:
        CheckpointError: a rank file is missing or its index does not verify.
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
                    replicas = _replicas(checkpoint, rank, parts[1])
                    stage = stages[rank, parts[1]] = Stage(stage=parts[1], rank=rank, replicas=replicas)
                stage.nbytes += entry.nbytes
                held = {"inflight": stage.inflight, "versions": stage.versions, "predictions": stage.predictions}
                held.get(parts[2], set()).add(int(parts[3]))
    return list(layers.values()), list(stages.values())


def _replicas(checkpoint: CheckpointSet, rank: int, stage: str) -> int:
    described = checkpoint.index(rank).meta.get("stages", {}).get(stage, {})
    return int(described.get("replicas", 1))
