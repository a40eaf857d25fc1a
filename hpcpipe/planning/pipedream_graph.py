"""Reads the graph files of PipeDream's profiler (`graph.txt`): a line per node, tab-indented edges.

It owns their syntax and what their figures mean (section 3.1 of the paper, SOSP'19, and its optimizer's code). It
knows nothing of hpcpipe's own profiles.

    node4 -- Embedding(32320, 1024) -- forward_compute_time=0.073, backward_compute_time=6.949, activation_size=...
        node1 -- node4
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from hpcpipe.errors import PlanError

_KEYS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
# The description may hold anything, " -- " included: the figures are the last that looks like them.
_NODE = re.compile(rf"(?P<id>\S+) -- (?P<what>.*) -- (?P<figures>{_KEYS[0]}=.*?)(?: -- stage_id=\d+)?")
_EDGE = re.compile(r"\t+(?P<source>\S+) -- (?P<destination>\S+)\s*")
_LARGEST = 2.0**53
# Their output is the memory of another layer's output, so that autograd keeps nothing more for them.
_VIEWS = ("View", "Size", "__getitem__")


class GraphNode(NamedTuple):
    """One layer: seconds and bytes of one pass over a minibatch."""

    name: str
    forward_s: float
    backward_s: float
    output_bytes: int
    parameter_bytes: int
    saved_bytes: int


class Graph(NamedTuple):
    """Nodes in an order in which they can run; an edge (i, k): node k reads the output of node i."""

    nodes: tuple[GraphNode, ...]
    edges: tuple[tuple[int, int], ...]
    input_bytes: int


class _Line(NamedTuple):
    number: int
    what: str
    figures: tuple[float, ...]


def looks_like_graph(text: str) -> bool:
    """Whether some line names PipeDream's first figure, or the first line begins as a node's does."""
    return f"{_KEYS[0]}=" in text or re.match(r"\s*node\d+ -- ", text) is not None


def parse_graph(text: str, source: str) -> Graph:
    """Return the graph in `text`; `source` names the file in messages.

    As in PipeDream's optimizer, inputs are no layers (their loading runs beside the first stage and their bytes
    never cross a cut), and a `__getitem__` that nobody reads is dropped. Times are milliseconds in the file; a
    list-valued size is summed. Each layer is taken to keep its output for the backward pass, which the files do
    not say, except where that is another layer's memory (views and in-place layers).

    Raises PlanError: a line that is neither node nor edge, a number that is negative or none, an edge to a node
    that is not there, a circle; with the line's number.
    """
    lines, edges = _read(text, source)
    follows: dict[str, dict[str, int]] = {name: {} for name in lines}
    for number, (start, end) in edges:
        for name in (start, end):
            if name not in lines:
                raise PlanError(
                    f"{source}:{number}: the edge {start} -- {end} names {name}, which is no node here"
                )
        follows[start].setdefault(end, number)
    order = _order(lines, follows, source)
    inputs = [name for name in order if _is_input(name, lines, follows)]
    unread = [name for name in order if lines[name].what.startswith("__getitem__") and not follows[name]]
    kept = [name for name in order if name not in {*inputs, *unread}]
    if not kept:
        raise PlanError(f"{source}: holds no layer beside inputs")
    place = {name: index for index, name in enumerate(kept)}
    return Graph(
        nodes=tuple(_node(name, lines[name]) for name in kept),
        edges=tuple(sorted((place[a], place[b]) for a in kept for b in follows[a] if b in place)),
        input_bytes=sum(round(lines[name].figures[2]) for name in inputs),
    )


def _read(text: str, source: str) -> tuple[dict[str, _Line], list[tuple[int, tuple[str, str]]]]:
    lines: dict[str, _Line] = {}
    edges = []
    for number, line in enumerate(text.split("\n"), 1):
        where = f"{source}:{number}"
        line = line.rstrip()
        if not line:
            continue
        if line.startswith("\t"):
            edge = _EDGE.fullmatch(line)
            if edge is None:
                raise PlanError(f"{where}: must be a tab and an edge, node1 -- node2, got {_short(line)}")
            edges.append((number, (edge["source"], edge["destination"])))
            continue
        node = _NODE.fullmatch(line)
        if node is None:
            wanted = f"node1 -- Description -- {', '.join(f'{key}=...' for key in _KEYS)}"
            raise PlanError(f"{where}: must be a node, {wanted}, got {_short(line)}")
        if node["id"] in lines:
            raise PlanError(f"{where}: {node['id']} is there already, in line {lines[node['id']].number}")
        lines[node["id"]] = _Line(number, node["what"].strip(), tuple(_figures(node["figures"], where)))
    return lines, edges


def _figures(text: str, where: str) -> Iterator[float]:
    pairs = [part.partition("=") for part in text.split(", ")]
    if [key for key, _, _ in pairs] != list(_KEYS):
        raise PlanError(f"{where}: must give {', '.join(_KEYS)} in this order, got {_short(text)}")
    for key, _, value in pairs:
        listed = key == "activation_size" and value.startswith("[") and value.endswith("]")
        total = sum(_number(part, key, where) for part in (value[1:-1].split(";") if listed else [value]))
        yield total / 1e3 if key.endswith("_time") else total


def _number(text: str, key: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= _LARGEST:
        raise PlanError(f"{where}: {key} must be a number, at least 0 and finite, got {_short(text)}")
    return value


def _order(lines: dict[str, _Line], follows: dict[str, dict[str, int]], source: str) -> list[str]:
    """Every node behind all that it reads; of those that could come next, the one with the lowest number."""
    missing = dict.fromkeys(lines, 0)
    for ends in follows.values():
        for end in ends:
            missing[end] += 1
    ready = [(_rank(name), name) for name, count in missing.items() if count == 0]
    heapq.heapify(ready)
    order: list[str] = []
    while ready:
        name = heapq.heappop(ready)[1]
        order.append(name)
        for end in follows[name]:
            missing[end] -= 1
            if missing[end] == 0:
                heapq.heappush(ready, (_rank(end), end))
    if len(order) < len(lines):
        done = set(order)
        waits_for = {end: start for start in lines if start not in done for end in follows[start]}
        # A node that waits for ever may only stand behind the circle, which is met by going backward.
        name, seen = next(name for name in lines if name not in done), set[str]()
        while name not in seen:
            seen.add(name)
            name, after = waits_for[name], name
        raise PlanError(f"{source}:{follows[name][after]}: the edge {name} -- {after} closes a circle")
    return order


def _rank(name: str) -> tuple[int, str]:
    digits = re.search(r"\d{1,9}$", name)
    return (int(digits[0]) if digits else 0, name)


def _is_input(name: str, lines: dict[str, _Line], follows: dict[str, dict[str, int]]) -> bool:
    return lines[name].what.startswith("Input") and not any(name in ends for ends in follows.values())


def _node(name: str, line: _Line) -> GraphNode:
    forward, backward, output, parameters = line.figures
    short = " ".join(line.what.partition("(")[0].split())
    shares = line.what.startswith(_VIEWS) or "inplace" in line.what
    return GraphNode(
        name=f"{name} {short}".strip() if short.isprintable() else name,
        forward_s=forward,
        backward_s=backward,
        output_bytes=round(output),
        parameter_bytes=round(parameters),
        saved_bytes=0 if shares else round(output),
    )


def _short(text: str) -> str:
    text = " ".join(text.split())
    return repr(text if len(text) <= 60 else text[:57] + "...")
