"""Small profiles and topologies whose plans can be worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcpipe.planning.profile import LayerCost, Profile
from hpcpipe.planning.topology import Level, Topology

PROFILES = Path(__file__).parents[1] / "data" / "profiles"


def chain(*seconds: float, rows: int = 10, about: Any = None, **every: Any) -> Profile:
    """A chain of layers a, b, c, ... with these seconds for F and B together, a third of them forward."""
    sizes = {"output_bytes": 0, "parameter_bytes": 0, **every}
    layers = tuple(
        LayerCost(name=chr(ord("a") + i), forward_s=whole / 3, backward_s=whole * 2 / 3, **sizes)
        for i, whole in enumerate(seconds)
    )
    edges = tuple((i, i + 1) for i in range(len(layers) - 1))
    return Profile(layers=layers, edges=edges, rows=rows, about=about or {})


def nodes(ranks: int, per_node: int, inner: float = 1e10, outer: float = 1e9) -> Topology:
    """Nodes of `per_node` ranks; bytes a second inside a node and between nodes."""
    return Topology(
        levels=(
            Level(name="node", size=per_node, bandwidth=inner),
            Level(name="network", size=ranks, bandwidth=outer),
        )
    )
