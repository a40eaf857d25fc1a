"""PipeDream's graph files: published ones, and each kind of line that can be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcpipe.errors import PlanError
from hpcpipe.planning.pipedream_graph import Graph, parse_graph
from hpcpipe.planning.profile import load_profile

PROFILES = Path(__file__).parents[1] / "data" / "profiles"


def node(number: int, what: str = "Conv2d(3, 4)", times: str = "1.0 2.0", sizes: str = "10.0 20.0") -> str:
    forward, backward = times.split()
    activation, parameters = sizes.split()
    return (
        f"node{number} -- {what} -- forward_compute_time={forward}, backward_compute_time={backward}, "
        f"activation_size={activation}, parameter_size={parameters}"
    )


def parse(*lines: str) -> Graph:
    return parse_graph("\n".join(lines), "graph.txt")


def refusal(*lines: str) -> str:
    with pytest.raises(PlanError) as caught:
        parse(*lines)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "layers", "milliseconds", "parameters"),
    [
        # Counted and added up in the files with other tools; without inputs and unread __getitem__s.
        ("vgg16", 40, 672.535, 553_430_176),
        ("resnet50", 176, 443.419, 102_228_128),
        ("alexnet", 22, 85.321, 244_403_360),
        ("gnmt8", 37, 89.416, 775_063_808),
    ],
)
def test_published_profiles_are_read_whole(name: str, layers: int, milliseconds: float, parameters: int) -> None:
    profile = load_profile(PROFILES / f"{name}.txt")

    assert len(profile.layers) == layers
    assert sum(layer.forward_s + layer.backward_s for layer in profile.layers) == pytest.approx(milliseconds / 1e3)
    assert sum(layer.parameter_bytes for layer in profile.layers) == parameters


def test_nodes_and_edges_may_come_in_any_order() -> None:
    graph = parse("\tnode2 -- node10", node(10, "C()"), node(2, "B()"), "\tnode1 -- node2", node(1, "A()"))

    assert [entry.name for entry in graph.nodes] == ["node1 A", "node2 B", "node10 C"]
    assert graph.edges == ((0, 1), (1, 2))


def test_times_become_seconds_and_sizes_stay_bytes() -> None:
    found = parse(node(1, times="1.5 2.25", sizes="6291456.0 132382720.000")).nodes[0]

    assert (found.forward_s, found.backward_s) == (0.0015, 0.00225)
    assert (found.output_bytes, found.parameter_bytes) == (6291456, 132382720)


def test_a_list_of_sizes_is_summed() -> None:
    line = node(7, "LSTM(2048, 1024)").replace("=10.0", "=[6291456.0; 131072.0; 131072.0]")

    assert parse(line).nodes[0].output_bytes == 6291456 + 2 * 131072


def test_a_description_may_look_like_anything() -> None:
    graph = parse(node(1, "My -- net, a=1, forward_compute_time=3 -- (x)"), node(2, "Block(  (a): B -- c)"))

    assert [entry.name for entry in graph.nodes] == [
        "node1 My -- net, a=1, forward_compute_time=3 --",
        "node2 Block",
    ]
    assert graph.nodes[0].forward_s == 0.001


def test_the_stage_that_pipedream_chose_is_ignored() -> None:
    assert parse(node(1) + " -- stage_id=3") == parse(node(1))


def test_inputs_are_no_layers_but_their_bytes_are_known() -> None:
    graph = parse(node(1, "Input0", "635.9 0.0", "77.0 0.0"), node(2), "\tnode1 -- node2")

    assert [entry.name for entry in graph.nodes] == ["node2 Conv2d"]
    assert (graph.edges, graph.input_bytes) == ((), 77)


def test_a_layer_that_is_only_called_like_an_input_stays() -> None:
    graph = parse(node(1), node(2, "InputNorm(3)"), "\tnode1 -- node2")

    assert [entry.name for entry in graph.nodes] == ["node1 Conv2d", "node2 InputNorm"]


def test_a_part_of_a_tuple_that_nobody_reads_is_dropped() -> None:
    graph = parse(
        *(node(1, "LSTM"), node(2, "__getitem__(0)"), node(3, "__getitem__(1)"), node(4)),
        *("\tnode1 -- node2", "\tnode1 -- node3", "\tnode2 -- node4"),
    )

    assert [entry.name for entry in graph.nodes] == ["node1 LSTM", "node2 __getitem__", "node4 Conv2d"]


def test_layers_keep_their_outputs_unless_these_are_another_layers_memory() -> None:
    graph = parse(
        *(node(i, what) for i, what in enumerate(["Conv2d(3, 4)", "ReLU(inplace)", "View(-1)", "ReLU()"]))
    )

    assert [entry.saved_bytes for entry in graph.nodes] == [10, 0, 0, 10]


def test_lines_may_end_as_on_another_system_and_empty_ones_are_skipped() -> None:
    assert parse(node(1) + "\r", "", node(2) + "\r", "\tnode1 -- node2\r", "   ") == parse(
        node(1), node(2), "\tnode1 -- node2"
    )


def test_an_edge_that_stands_twice_is_one_tensor() -> None:
    assert parse(node(1), node(2), "\tnode1 -- node2", "\tnode1 -- node2").edges == ((0, 1),)


def test_layers_of_one_kind_have_different_names() -> None:
    names = [layer.name for layer in load_profile(PROFILES / "resnet50.txt").layers]

    assert len(set(names)) == len(names)


def test_without_rows_throughput_counts_minibatches() -> None:
    assert load_profile(PROFILES / "vgg16.txt").unit == "minibatches"
    assert load_profile(PROFILES / "vgg16.txt", rows=128).unit == "samples"
    assert load_profile(PROFILES / "vgg16.txt", rows=128).rows == 128


@pytest.mark.parametrize("value", ["-1.0", "nan", "inf", "1,0", "", "0x1", "[1.0]"])
def test_a_time_that_is_none_is_named_with_its_line(value: str) -> None:
    line = node(2).replace("forward_compute_time=1.0", f"forward_compute_time={value}")

    said = refusal(node(1), line)

    assert said.startswith("graph.txt:2: ")
    assert "forward_compute_time" in said


@pytest.mark.parametrize("value", ["[1.0; -2.0]", "[1.0; ]", "[1.0", "[]", "nan", "1e300"])
def test_a_size_that_is_none_is_named_with_its_line(value: str) -> None:
    line = node(1).replace("activation_size=10.0", f"activation_size={value}")

    assert refusal(line).startswith("graph.txt:1: activation_size must be a number, at least 0 and finite, got '")


@pytest.mark.parametrize(
    "line",
    [
        "node2",
        "node2 -- Conv2d",
        "node2 -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=1, parameter_size=1",
        "forward_compute_time=1.0",
        "node2 -- X -- backward_compute_time=2.0, activation_size=1.0, parameter_size=1.0",
        "  node1 -- node2",
    ],
)
def test_a_line_that_is_no_node_is_shown_with_its_number(line: str) -> None:
    said = refusal(node(1), line)

    assert said.startswith("graph.txt:2: must be a node, node1 -- Description -- forward_compute_time=..., ")


def test_figures_in_another_order_are_refused() -> None:
    line = (
        "node1 -- X -- forward_compute_time=1.0, activation_size=1.0, backward_compute_time=2.0, parameter_size=1"
    )

    assert refusal(line).startswith("graph.txt:1: must give forward_compute_time, backward_compute_time, ")


@pytest.mark.parametrize("edge", ["\tnode1", "\tnode1 - node2", "\tnode1 -- node2 -- node3"])
def test_a_line_that_is_no_edge_is_shown_with_its_number(edge: str) -> None:
    said = refusal(node(1), node(2), edge)

    assert said.startswith("graph.txt:3: must be a tab and an edge, node1 -- node2, got '")


def test_an_edge_to_no_node_is_named() -> None:
    said = refusal(node(1), "\tnode1 -- node9")

    assert said == "graph.txt:2: the edge node1 -- node9 names node9, which is no node here"


def test_a_node_that_is_there_twice_is_named() -> None:
    assert refusal(node(1), node(2), node(1)) == "graph.txt:3: node1 is there already, in line 1"


def test_a_circle_is_named_by_one_of_its_edges() -> None:
    said = refusal(
        *(node(i) for i in range(1, 6)),
        *("\tnode1 -- node2", "\tnode2 -- node3", "\tnode3 -- node4", "\tnode4 -- node2", "\tnode4 -- node5"),
    )

    edges = {"graph.txt:7": "node2 -- node3", "graph.txt:8": "node3 -- node4", "graph.txt:9": "node4 -- node2"}
    assert said in {f"{where}: the edge {edge} closes a circle" for where, edge in edges.items()}


def test_a_graph_of_inputs_alone_has_no_layer() -> None:
    assert refusal(node(1, "Input")) == "graph.txt: holds no layer beside inputs"
