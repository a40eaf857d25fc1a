"""Faster and slower machines: factors are speeds, and mistakes are one line."""

from __future__ import annotations

import pytest

from hpcpipe.errors import PlanError
from hpcpipe.planning.topology import Level, Topology
from hpcpipe.simulation import WhatIf
from tests.unit.schedule_cases import pipedream
from tests.unit.simulation_cases import links, run, unit


def test_factors_are_read_with_and_without_the_x() -> None:
    assert WhatIf.parse("bandwidth=2x, compute=0.5") == WhatIf(bandwidth=2.0, compute=0.5)


def test_twice_the_compute_halves_every_pass_and_update() -> None:
    costs = unit(update_s=1.0)
    schedule = pipedream(stages=3, minibatches=20)

    assert run(schedule, costs, what_if=WhatIf(compute=2.0)).seconds == run(schedule, costs).seconds / 2


def test_twice_the_bandwidth_halves_what_is_bound_by_a_link() -> None:
    schedule = pipedream(stages=2, minibatches=60)
    costs = unit(output_bytes=40)

    as_it_is, faster = run(schedule, costs), run(schedule, costs, what_if=WhatIf(bandwidth=2.0))

    assert faster.minibatches_per_s == pytest.approx(2 * as_it_is.minibatches_per_s)


def test_a_faster_latency_is_a_shorter_one() -> None:
    schedule, topology = pipedream(stages=2, minibatches=1), links(2, latency_s=3.0)

    found = run(schedule, topology=topology, what_if=WhatIf(latency=3.0))

    assert found.seconds == 4.0 + 2 * 1.0


def test_a_faster_all_reduce_leaves_messages_alone() -> None:
    costs = unit(ready=((1.0, 8),))
    replicated = pipedream(replicas=(2,), minibatches=2)

    assert run(replicated, costs, what_if=WhatIf(allreduce=4.0)).seconds == 2.0 + 8 / 4
    assert WhatIf(allreduce=4.0).topology(links(2)).levels[0].bandwidth == 1.0


def test_bandwidth_counts_for_all_reduces_measured_by_themselves_too() -> None:
    topology = Topology(levels=(Level(name="link", size=2, bandwidth=4.0, allreduce_bandwidth=1.0),))

    assert WhatIf(bandwidth=2.0).topology(topology).levels[0].allreduce_bandwidth == 2.0


def test_it_says_what_is_changed() -> None:
    assert str(WhatIf(bandwidth=2.0, compute=0.5)) == "compute 0.5x, bandwidth 2x"
    assert str(WhatIf()) == "the machine as it is"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bandwith=2x", 'did you mean "bandwidth"'),
        ("speed=2x", "write one of compute, bandwidth, latency, allreduce"),
        ("", "write one of"),
        ("bandwidth", "must be a speed factor above 0"),
        ("bandwidth=fast", "must be a speed factor above 0"),
        ("compute=0x", "must be a speed factor above 0"),
        ("compute=-1", "must be a speed factor above 0"),
        ("compute=nan", "must be a speed factor above 0"),
        ("latency=inf", "must be a speed factor above 0"),
        ("compute=2x,compute=3x", "compute is there twice"),
    ],
)
def test_a_mistake_is_one_line(text: str, said: str) -> None:
    with pytest.raises(PlanError, match=said) as raised:
        WhatIf.parse(text)

    assert "\n" not in str(raised.value)
