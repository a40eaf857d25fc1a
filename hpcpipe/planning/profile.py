"""Profiles: what each layer of a model costs in time and bytes, in memory and as a file.

It owns the record that `hpcpipe profile` writes and that `plan` and `simulate` read: C, P and o of PipeDream
(SOSP'19, section 3.1) and what its planner leaves out. It measures nothing and decides nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hpcpipe.errors import PlanError
from hpcpipe.planning import records
from hpcpipe.planning.pipedream_graph import looks_like_graph, parse_graph

FORMAT = "hpcpipe-profile"
VERSION = 1
MINIBATCHES = "minibatches"
"""The value of `about["unit"]` where a pass holds an unknown number of samples."""


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """What one layer costs in one pass: seconds and bytes.

    Raises PlanError: a value is negative, not finite, no number, or no whole number of bytes.
    """

    name: str
    forward_s: float
    backward_s: float
    output_bytes: int
    """What crosses a cut behind this layer on the way forward."""
    parameter_bytes: int
    gradient_bytes: int | None = None
    """What comes back over that cut; None where it is as much."""
    buffer_bytes: int = 0
    state_bytes: int = 0
    """The optimizer's state, master weights included."""
    saved_bytes: int = 0
    """What autograd keeps from the forward to the backward pass, beside the weights."""
    update_s: float = 0.0
    forward_spread_s: float = 0.0
    backward_spread_s: float = 0.0

    def __post_init__(self) -> None:
        records.text(self.name, "name")
        where = f"{records.shown(self.name)}: "
        for key in ("forward_s", "backward_s", "update_s", "forward_spread_s", "backward_spread_s"):
            records.number(getattr(self, key), where + key)
        for key in ("output_bytes", "parameter_bytes", "buffer_bytes", "state_bytes", "saved_bytes"):
            records.count(getattr(self, key), where + key)
        if self.gradient_bytes is not None:
            records.count(self.gradient_bytes, where + "gradient_bytes")


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The layers of a model in an order in which they can run, with the cost of one pass of `rows` samples each.

    A pass is a minibatch, or a microbatch in a run that has microbatches. An edge (i, k) says that layer k reads
    the output of layer i. Seconds and bytes throughout.

    Raises PlanError: no layers, two of one name, an edge or a pair that leads nowhere or backward, or a wrong
    number.
    """

    layers: tuple[LayerCost, ...]
    edges: tuple[tuple[int, int], ...]
    rows: int
    input_bytes: int = 0
    pass_overhead_s: float = 0.0
    """Of each forward and each backward pass of a stage, beside its layers."""
    data_s: float = 0.0
    """The first stage loads the inputs of a pass."""
    targets_s: float = 0.0
    """The last stage loads the targets of a pass."""
    message_s: float = 0.0
    """CPU time of a rank for each message that it sends or receives."""
    shared: tuple[tuple[int, int], ...] = ()
    """Pairs of layers (the earlier first) that share a weight, and so must be in one stage."""
    about: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Where the figures come from: device, dtype, batch, and so on."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise PlanError("layers: must hold at least one layer, got none")
        first: dict[str, int] = {}
        for index, layer in enumerate(self.layers):
            if first.setdefault(layer.name, index) != index:
                name = records.shown(layer.name)
                raise PlanError(f"layers[{index}].name: {name} is the name of layers[{first[layer.name]}], too")
        seen: set[tuple[int, int]] = set()
        for index, edge in enumerate(self.edges):
            self._check_edge(edge, f"edges[{index}]")
            if edge in seen:
                raise PlanError(f"edges[{index}]: {list(edge)} is there twice")
            seen.add(edge)
        for index, pair in enumerate(self.shared):
            self._check_edge(pair, f"shared[{index}]")
        records.count(self.rows, "rows", unit="samples", least=1)
        records.count(self.input_bytes, "input_bytes")
        for key in ("pass_overhead_s", "data_s", "targets_s", "message_s"):
            records.number(getattr(self, key), key)

    def _check_edge(self, edge: tuple[int, int], where: str) -> None:
        last = len(self.layers) - 1
        if len(edge) != 2 or not all(type(end) is int and 0 <= end <= last for end in edge):
            records.wrong(where, f"two layers' numbers, 0 to {last}", edge)
        if edge[0] >= edge[1]:
            raise PlanError(
                f"{where}: {list(edge)} leads backward; layers must stand in the order in which they run"
            )

    @property
    def is_chain(self) -> bool:
        """Whether each layer reads the output of the one before it, and of no other."""
        return set(self.edges) == {(index, index + 1) for index in range(len(self.layers) - 1)}

    @property
    def unit(self) -> str:
        """What throughput counts: "samples", or "minibatches" where nobody knows the samples of a pass."""
        return MINIBATCHES if self.about.get("unit") == MINIBATCHES else "samples"


def load_profile(path: str | os.PathLike[str], *, rows: int | None = None) -> Profile:
    """Return the profile at `path`: JSON as `save_profile` writes it, or a graph of PipeDream's profiler.

    `rows`: samples per pass, for PipeDream's graphs, which do not say. Without it throughput counts minibatches.

    Raises PlanError: the file cannot be read, or a value in it is wrong; file, layer, key, got and expected.
    """
    text = records.read_text(path, "profile")
    if text.lstrip()[:1] == "{":
        profile = parse_profile(records.parse(text, path, FORMAT, VERSION), source=str(path))
        if rows not in (None, profile.rows):
            raise PlanError(f"{path}: says itself that a pass has {profile.rows} rows; leave rows = {rows} out")
        return profile
    if not looks_like_graph(text):
        raise PlanError(f"{path}: is neither a profile of hpcpipe (JSON) nor a graph of PipeDream (text)")
    return _from_pipedream(text, str(path), rows)


def save_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write `profile` to `path` as a whole or not at all. Raises PlanError: it cannot be written."""
    records.write(path, FORMAT, VERSION, profile_table(profile))


def profile_table(profile: Profile) -> dict[str, Any]:
    """Return the profile as JSON values."""
    return {**asdict(profile), "about": dict(profile.about)}


def parse_profile(found: Any, *, source: str) -> Profile:
    """Return the profile that `profile_table` made a table of; `source` stands before every message.

    Raises PlanError as `load_profile` does.
    """
    try:
        given = dict(records.entries(found, Profile, ""))
        given["layers"] = tuple(
            _layer(entry, i) for i, entry in enumerate(records.listed(given["layers"], "layers"))
        )
        for key in ("edges", "shared"):
            if key in given:
                entries = records.listed(given[key], key)
                given[key] = tuple(_pair(entry, f"{key}[{i}]") for i, entry in enumerate(entries))
        given["about"] = records.table(given.get("about", {}), "about")
        return Profile(**given)
    except PlanError as error:
        raise PlanError(f"{source}: {error}") from None


def _layer(entry: Any, index: int) -> LayerCost:
    where = f"layers[{index}]"
    given = records.entries(entry, LayerCost, where)
    try:
        return LayerCost(**given)
    except PlanError as error:
        raise PlanError(f"{where} {error}") from None


def _pair(entry: Any, where: str) -> tuple[int, int]:
    ends: Sequence[Any] = records.listed(entry, where)
    if len(ends) != 2:
        records.wrong(where, "two layers' numbers", entry)
    return (ends[0], ends[1])


def _from_pipedream(text: str, source: str, rows: int | None) -> Profile:
    graph = parse_graph(text, source)
    try:
        return Profile(
            layers=tuple(
                LayerCost(
                    name=node.name,
                    forward_s=node.forward_s,
                    backward_s=node.backward_s,
                    output_bytes=node.output_bytes,
                    parameter_bytes=node.parameter_bytes,
                    # The files do not name the optimizer; PipeDream's own runs had one momentum per weight.
                    state_bytes=node.parameter_bytes,
                    saved_bytes=node.saved_bytes,
                )
                for node in graph.nodes
            ),
            edges=graph.edges,
            rows=1 if rows is None else rows,
            input_bytes=graph.input_bytes,
            about={"source": "PipeDream", **({"unit": MINIBATCHES} if rows is None else {})},
        )
    except PlanError as error:
        raise PlanError(f"{source}: {error}") from None
