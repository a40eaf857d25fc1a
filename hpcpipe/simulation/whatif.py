"""What would happen on a faster or slower machine: factors on the speeds of its parts.

A factor is a speed: `bandwidth=2x` sends twice as many bytes a second, `compute=0.5x` takes twice as long for
every pass and update, `latency=2x` halves every latency. It changes costs and topologies and simulates nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from difflib import get_close_matches

from hpcpipe.errors import PlanError
from hpcpipe.planning.topology import Topology
from hpcpipe.simulation.costs import StageCosts

_LARGEST = 1e6


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """Speed factors: 2 is twice as fast. `allreduce` comes on top of `bandwidth`."""

    compute: float = 1.0
    bandwidth: float = 1.0
    latency: float = 1.0
    allreduce: float = 1.0

    @classmethod
    def parse(cls, text: str) -> WhatIf:
        """Read "bandwidth=2x,compute=0.5x". Raises PlanError for unknown names and factors that are none."""
        names = [field.name for field in fields(cls)]
        factors: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = (word.strip() for word in part.partition("="))
            if name not in names:
                close = get_close_matches(name, names, n=1)
                hint = f'; did you mean "{close[0]}"?' if close else ""
                raise PlanError(f"what if {part.strip()!r}: write {_form(names)}{hint}")
            if name in factors:
                raise PlanError(f"what if {text!r}: {name} is there twice")
            factors[name] = _factor(name, value)
        return cls(**factors)

    def costs(self, costs: StageCosts) -> StageCosts:
        """The costs of a stage on that machine."""
        if self.compute == 1.0:
            return costs
        return replace(
            costs,
            forward_s=costs.forward_s / self.compute,
            backward_s=costs.backward_s / self.compute,
            update_s=costs.update_s / self.compute,
            ready=tuple((when / self.compute, nbytes) for when, nbytes in costs.ready),
        )

    def topology(self, topology: Topology) -> Topology:
        """The topology of that machine."""
        levels = tuple(
            replace(
                level,
                bandwidth=level.bandwidth * self.bandwidth,
                latency_s=level.latency_s / self.latency,
                allreduce_bandwidth=(
                    None
                    if level.allreduce_bandwidth is None and self.allreduce == 1.0
                    else level.reduce_bandwidth * self.bandwidth * self.allreduce
                ),
            )
            for level in topology.levels
        )
        return replace(topology, levels=levels)

    def __str__(self) -> str:
        changed = [f"{f.name} {getattr(self, f.name):g}x" for f in fields(self) if getattr(self, f.name) != 1.0]
        return ", ".join(changed) or "the machine as it is"


def _factor(name: str, value: str) -> float:
    try:
        factor = float(value.removesuffix("x"))
    except ValueError:
        factor = 0.0
    if not 1 / _LARGEST <= factor <= _LARGEST:
        raise PlanError(
            f'what if {name}={value}: must be a speed factor above 0, as in "{name}=2x" (twice as fast)'
        )
    return factor


def _form(names: list[str]) -> str:
    return f'one of {", ".join(names)} with a speed factor, as in "bandwidth=2x" (twice as fast)'
