"""Profiles in memory and on disk: what is written is read again; a mistake is one line that names its place."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcpipe.errors import PlanError
from hpcpipe.planning.profile import LayerCost, Profile, load_profile, profile_table, save_profile

FIRST = LayerCost(name="first", forward_s=1e-3, backward_s=2e-3, output_bytes=64, parameter_bytes=128)
LAST = LayerCost(name="last", forward_s=1e-3, backward_s=0.0, output_bytes=4, parameter_bytes=0, gradient_bytes=0)
PROFILE = Profile(layers=(FIRST, LAST), edges=((0, 1),), rows=32, about={"device": "cpu", "threads": 2})

sizes = st.integers(0, 2**53)
times = st.floats(0, 1e9, allow_nan=False)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    names = draw(st.lists(st.text(st.characters(categories=["L", "N"]), min_size=1), min_size=1, unique=True))
    layers = [
        LayerCost(
            name=name,
            forward_s=draw(times),
            backward_s=draw(times),
            output_bytes=draw(sizes),
            parameter_bytes=draw(sizes),
            gradient_bytes=draw(st.none() | sizes),
            saved_bytes=draw(sizes),
        )
        for name in names
    ]
    pairs = [(i, k) for k in range(len(names)) for i in range(k)]
    some = st.lists(st.sampled_from(pairs), unique=True) if pairs else st.just([])
    return Profile(
        layers=tuple(layers),
        edges=tuple(draw(some)),
        shared=tuple(draw(some)),
        rows=draw(st.integers(1, 10**6)),
        data_s=draw(times),
    )


def written(path: Path, change: Any = None, **keys: Any) -> Path:
    """A good profile's file with some of its keys replaced, or changed by a function."""
    found: dict[str, Any] = {"format": "hpcpipe-profile", "version": 1, **profile_table(PROFILE), **keys}
    if change is not None:
        change(found)
    path.write_text(json.dumps(found))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(PlanError) as caught:
        load_profile(path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(path))
    return str(caught.value).removeprefix(f"{path}: ")


@settings(max_examples=30, deadline=None)
@given(profile=profiles())
def test_a_profile_is_read_as_it_was_written(profile: Profile, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "profile.json"

    save_profile(profile, path)

    assert load_profile(path) == profile


def test_what_the_figures_come_from_is_kept(tmp_path: Path) -> None:
    save_profile(PROFILE, tmp_path / "p.json")

    assert load_profile(tmp_path / "p.json").about == {"device": "cpu", "threads": 2}


def test_keys_with_a_default_may_be_left_out(tmp_path: Path) -> None:
    layer = {"name": "only", "forward_s": 1, "backward_s": 2, "output_bytes": 3, "parameter_bytes": 4}
    path = tmp_path / "p.json"
    path.write_text(
        json.dumps({"format": "hpcpipe-profile", "version": 1, "layers": [layer], "edges": [], "rows": 1})
    )

    found = load_profile(path).layers[0]

    assert (found.gradient_bytes, found.saved_bytes, found.update_s) == (None, 0, 0.0)


def test_layers_that_share_a_weight_are_kept_in_the_file(tmp_path: Path) -> None:
    save_profile(replace(PROFILE, shared=((0, 1),)), tmp_path / "p.json")

    assert json.loads((tmp_path / "p.json").read_text())["shared"] == [[0, 1]]
    assert load_profile(tmp_path / "p.json").shared == ((0, 1),)


def test_a_profile_that_does_not_say_so_shares_no_weights(tmp_path: Path) -> None:
    path = written(tmp_path / "p.json", lambda found: found.pop("shared"))

    assert load_profile(path).shared == ()


def test_saving_leaves_no_other_file_and_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    save_profile(PROFILE, path)
    save_profile(replace(PROFILE, rows=64), path)

    assert [entry.name for entry in tmp_path.iterdir()] == ["p.json"]
    assert load_profile(path).rows == 64


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"none/p\.json: cannot write it: No such file or directory"):
        save_profile(PROFILE, tmp_path / "none" / "p.json")


def test_a_chain_reads_each_layer_once_in_order() -> None:
    assert PROFILE.is_chain
    assert Profile(layers=(FIRST,), edges=(), rows=1).is_chain
    assert not replace(PROFILE, edges=()).is_chain
    middle = replace(FIRST, name="middle")
    assert not Profile(layers=(FIRST, middle, LAST), edges=((0, 1), (1, 2), (0, 2)), rows=1).is_chain


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, True, "1", None, [1.0], 10**400, 2e9])
@pytest.mark.parametrize("key", ["forward_s", "backward_s", "update_s"])
def test_a_time_is_a_finite_number_that_is_not_negative(key: str, value: Any) -> None:
    with pytest.raises(PlanError, match=rf'"first": {key}: must be a number of seconds, 0 to 1e\+09, got '):
        replace(FIRST, **{key: value})


@pytest.mark.parametrize("value", [-1, 1.5, True, "1", 2**53 + 1, math.nan])
@pytest.mark.parametrize("key", ["output_bytes", "parameter_bytes", "gradient_bytes", "saved_bytes"])
def test_a_size_is_a_whole_number_that_is_not_negative(key: str, value: Any) -> None:
    with pytest.raises(PlanError, match=rf'"first": {key}: must be a whole number of bytes, 0 to 2\^53, got '):
        replace(FIRST, **{key: value})


@pytest.mark.parametrize("key", ["pass_overhead_s", "data_s", "targets_s", "message_s"])
def test_times_of_the_whole_model_are_checked_too(key: str) -> None:
    with pytest.raises(PlanError, match=rf"^{key}: must be a number of seconds"):
        replace(PROFILE, **{key: -1e-9})


@pytest.mark.parametrize("rows", [0, -1, 1.0, True])
def test_a_pass_has_at_least_one_row(rows: Any) -> None:
    with pytest.raises(PlanError, match="rows: must be a whole number of samples, 1 to"):
        replace(PROFILE, rows=rows)


def test_a_profile_has_layers() -> None:
    with pytest.raises(PlanError, match="layers: must hold at least one layer"):
        replace(PROFILE, layers=(), edges=())


def test_two_layers_of_one_name_are_refused() -> None:
    with pytest.raises(PlanError, match=r'layers\[1\]\.name: "first" is the name of layers\[0\], too'):
        replace(PROFILE, layers=(FIRST, FIRST))


@pytest.mark.parametrize("edge", [(0, 2), (-1, 1), (0, True), (0, 1.0)])
def test_an_edge_joins_two_layers_that_are_there(edge: Any) -> None:
    with pytest.raises(PlanError, match=r"edges\[0\]: must be two layers' numbers, 0 to 1, got "):
        replace(PROFILE, edges=(edge,))


@pytest.mark.parametrize("edges", [((1, 0),), ((0, 0),), ((0, 1), (1, 0))])
def test_a_circle_cannot_be_written_since_edges_lead_forward(edges: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(PlanError, match=r"edges\[\d\]: .* leads backward; layers must stand in the order"):
        replace(PROFILE, edges=edges)


@pytest.mark.parametrize("pair", [(0, 2), (-1, 1), (0, True), (0, 1.0)])
def test_a_weight_is_shared_by_two_layers_that_are_there(pair: Any) -> None:
    with pytest.raises(PlanError, match=r"^shared\[1\]: must be two layers' numbers, 0 to 1, got "):
        replace(PROFILE, shared=((0, 1), pair))


@pytest.mark.parametrize("pair", [(1, 0), (1, 1)])
def test_of_layers_that_share_a_weight_the_earlier_stands_first(pair: tuple[int, int]) -> None:
    with pytest.raises(PlanError, match=r"^shared\[0\]: .* leads backward; layers must stand in the order"):
        replace(PROFILE, shared=(pair,))


def test_an_edge_stands_once() -> None:
    with pytest.raises(PlanError, match=r"edges\[1\]: \[0, 1\] is there twice"):
        replace(PROFILE, edges=((0, 1), (0, 1)))


def test_a_wrong_value_in_a_file_is_named_by_file_layer_and_key(tmp_path: Path) -> None:
    path = written(tmp_path / "p.json", lambda found: found["layers"][1].update(backward_s=-3))

    assert refusal(path) == 'layers[1] "last": backward_s: must be a number of seconds, 0 to 1e+09, got -3'


def test_an_unknown_key_is_answered_with_the_closest_one(tmp_path: Path) -> None:
    path = written(tmp_path / "p.json", lambda found: found["layers"][0].update(forward_ms=3))

    said = refusal(path)

    assert said.startswith('layers[0].forward_ms: no such key; did you mean "forward_s"?; the keys are name, ')


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"row": 3}, 'row: no such key; did you mean "rows"?'),
        ({"layers": {}}, "layers: must be a list, got {}"),
        ({"layers": [3]}, "layers[0]: must be an object, got 3"),
        ({"edges": [[0, 1, 2]]}, "edges[0]: must be two layers' numbers, got [0, 1, 2]"),
        ({"edges": [[0, [1]]]}, "edges[0]: must be two layers' numbers, 0 to 1, got [0, [1]]"),
        ({"edges": "chain"}, 'edges: must be a list, got "chain"'),
        ({"shared": 3}, "shared: must be a list, got 3"),
        ({"shared": [3]}, "shared[0]: must be a list, got 3"),
        ({"shared": [[0, 1], [1]]}, "shared[1]: must be two layers' numbers, got [1]"),
        (
            {"shared": [["first", "last"]]},
            'shared[0]: must be two layers\' numbers, 0 to 1, got ["first", "last"]',
        ),
        (
            {"shared": [[1, 0]]},
            "shared[0]: [1, 0] leads backward; layers must stand in the order in which they run",
        ),
        ({"about": []}, "about: must be an object, got []"),
        ({"format": "hpcpipe-plan"}, 'must have the format "hpcpipe-profile", got "hpcpipe-plan"'),
        ({"version": 2}, "version must be 1, got 2; this hpcpipe cannot read it"),
        ({"version": True}, "version must be 1, got true"),
    ],
)
def test_a_wrong_shape_of_the_file_is_one_line(tmp_path: Path, keys: dict[str, Any], says: str) -> None:
    assert refusal(written(tmp_path / "p.json", **keys)).startswith(says)


@pytest.mark.parametrize("key", ["name", "forward_s", "backward_s", "output_bytes", "parameter_bytes"])
def test_a_missing_key_of_a_layer_is_named(tmp_path: Path, key: str) -> None:
    path = written(tmp_path / "p.json", lambda found: found["layers"][0].pop(key))

    assert refusal(path) == f"layers[0].{key}: missing"


@pytest.mark.parametrize("key", ["layers", "edges", "rows"])
def test_a_missing_key_of_the_profile_is_named(tmp_path: Path, key: str) -> None:
    assert refusal(written(tmp_path / "p.json", lambda found: found.pop(key))) == f"{key}: missing"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"format": ', "is no valid JSON: "),
        ('{"rows": NaN}', "is no valid JSON: NaN is no number of JSON"),
        ('{"rows": -Infinity}', "is no valid JSON: -Infinity is no number of JSON"),
        ('{"rows": 1, "rows": 2}', 'is no valid JSON: the key "rows" stands twice in one object'),
        ('{"rows": ' + "9" * 5000 + "}", "is no valid JSON: "),
        ('{"a":' * 100_000, "is no valid JSON: nested too deeply"),
        ("{}", 'must have the format "hpcpipe-profile", got a JSON file without a format'),
        ("[]", "is neither a profile of hpcpipe (JSON) nor a graph of PipeDream (text)"),
        ("", "is neither a profile of hpcpipe (JSON) nor a graph of PipeDream (text)"),
    ],
    ids=lambda value: value[:20],
)
def test_a_file_that_is_no_profile_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)

    assert refusal(path).startswith(says)


def test_a_number_beyond_every_float_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(written(path).read_text().replace("0.001", "1e999", 1))

    assert "forward_s: must be a number of seconds, 0 to 1e+09, got Infinity" in refusal(path)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.json") == "no such profile; name an existing file"
    assert refusal(tmp_path) == "cannot read the profile: Is a directory"
    binary = tmp_path / "binary"
    binary.write_bytes(b"{\xff")
    assert refusal(binary) == "is not UTF-8 text (byte 1); this is no profile"


def test_a_file_far_too_long_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcpipe.planning.records.LONGEST_FILE", 2**20)
    path = tmp_path / "p.json"
    path.write_bytes(b" " * (2**20 + 1))

    assert refusal(path) == "longer than 1 MiB, which no profile is"


def test_a_profile_of_hpcpipe_says_itself_how_many_rows_it_has(tmp_path: Path) -> None:
    path = written(tmp_path / "p.json")

    assert load_profile(path, rows=32) == PROFILE
    with pytest.raises(PlanError, match="says itself that a pass has 32 rows; leave rows = 64 out"):
        load_profile(path, rows=64)
