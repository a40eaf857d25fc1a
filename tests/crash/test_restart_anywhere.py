"""One checkpoint goes on anywhere: to the bit on the same pipeline, and elsewhere as the serial references say.

On another asynchronous pipeline the run must equal, to the bit, the replay that begins with what the checkpoint
holds; on a synchronous one it must follow plain torch that does so, to rounding. Both references know nothing of
checkpoints: they are given weights, buffers, momentum and the minibatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpcpipe.checkpoint.digest import digest
from hpcpipe.checkpoint.sets import choose, open_set
from tests.mpi.pipeline_runs import Trained, train_from
from tests.oracle.moving import CUT, REPLICATED, SPECTRAIN, STASH, cut_of, moving
from tests.oracle.plain import train_plainly
from tests.oracle.replay import replay
from tests.oracle.runs import Outcome, assert_close, assert_same, held_by


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where a checkpoint goes on; `differs` is what the run must say to differ, None where it is exact."""

    source: str
    ranks: int
    pipeline: dict[str, Any]
    differs: str | None


SOURCES = {"spectrain": SPECTRAIN, "stash": STASH, "replicated": REPLICATED}
"""Each on 4 ranks, with minibatches in flight at the cut."""

OTHER_STAGES = "stages, replicas"
OTHER_SCHEDULE = "stages, replicas, schedule"
TARGETS = {
    **{
        f"4 stages on {ranks}": Target(source="spectrain", ranks=ranks, pipeline=SPECTRAIN, differs=None)
        for ranks in (1, 2, 3, 4)
    },
    "stash on 2": Target(source="stash", ranks=2, pipeline=STASH, differs=None),
    "replicas on 4": Target(source="replicated", ranks=4, pipeline=REPLICATED, differs=None),
    "1 stage": Target(source="spectrain", ranks=1, pipeline={"stages": 1}, differs=OTHER_STAGES),
    "2 stages": Target(source="spectrain", ranks=2, pipeline={"stages": 2}, differs=OTHER_STAGES),
    "3 stages": Target(source="spectrain", ranks=3, pipeline={"stages": 3}, differs=OTHER_STAGES),
    "another balance": Target(source="spectrain", ranks=4, pipeline={"balance": (2, 1, 1, 1)}, differs="stages"),
    "replicas 2-1": Target(source="spectrain", ranks=3, pipeline={"replicas": (2, 1)}, differs=OTHER_STAGES),
    "replicas 1-2-1": Target(source="spectrain", ranks=4, pipeline={"replicas": (1, 2, 1)}, differs=OTHER_STAGES),
    "other replicas": Target(source="replicated", ranks=3, pipeline={"replicas": (2, 1)}, differs=OTHER_STAGES),
    "no replicas": Target(source="replicated", ranks=3, pipeline={"stages": 3}, differs="replicas"),
    "spectrain to stash": Target(source="spectrain", ranks=4, pipeline=STASH, differs="policy"),
    "stash to spectrain": Target(source="stash", ranks=4, pipeline=SPECTRAIN, differs="policy"),
    "vertical_sync": Target(
        source="spectrain", ranks=2, pipeline={"stages": 4, "policy": "vertical_sync"}, differs="policy"
    ),
    "none": Target(source="spectrain", ranks=3, pipeline={"stages": 3, "policy": "none"}, differs=OTHER_STAGES),
    **{
        f"{name} on {ranks}": Target(
            source=source,
            ranks=ranks,
            pipeline={"schedule": name, "stages": ranks, "microbatches": 2},
            differs=differs,
        )
        for name, ranks, source, differs in (
            ("gpipe", 1, "spectrain", OTHER_SCHEDULE),
            ("1f1b", 2, "replicated", OTHER_SCHEDULE),
            ("gpipe", 3, "stash", OTHER_SCHEDULE),
            ("1f1b", 4, "spectrain", "schedule"),
        )
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("anywhere")


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    """The unbroken runs, which leave the checkpoints, and what becomes of these; one job a number of ranks."""
    found: dict[str, Trained] = {}
    for ranks in (4, 3, 2, 1):
        configs = {name: moving(folder / name, SOURCES[name]) for name in SOURCES if ranks == 4}
        starts = {}
        for name, target in TARGETS.items():
            if target.ranks == ranks:
                configs[name] = moving(_place(folder, name), target.pipeline)
                starts[name] = cut_of(folder / target.source)
        found |= train_from(configs, starts, ranks, tmp_path_factory.mktemp(f"on{ranks}"))
    return found


def _place(folder: Path, name: str) -> Path:
    return folder / "resumed" / name.replace(" ", "-")


def test_the_checkpoints_hold_minibatches_in_flight(folder: Path, trained: dict[str, Trained]) -> None:
    for name in SOURCES:
        found = open_set(cut_of(folder / name))
        metas = [meta for rank in range(4) for meta in found.index(rank).meta["stages"].values()]
        assert sum(len(meta["in_flight"]) for meta in metas) > 3


@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if target.differs is None])
def test_the_same_pipeline_continues_to_the_bit_on_any_number_of_ranks(
    folder: Path, trained: dict[str, Trained], name: str
) -> None:
    unbroken, continued = trained[TARGETS[name].source], trained[name]

    assert "continues it to the bit" in continued.said
    assert continued.outcome.losses == unbroken.outcome.losses[CUT:]
    prints = [digest(choose(path, deep=True)[0]) for path in (_place(folder, name), folder / TARGETS[name].source)]
    assert prints[0] == prints[1]


@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if target.differs is not None])
def test_another_pipeline_goes_on_from_the_cut_as_the_serial_reference_does(
    folder: Path, trained: dict[str, Trained], name: str
) -> None:
    target, continued = TARGETS[name], trained[name]
    start = held_by(cut_of(folder / target.source), "buffers_next")
    config = moving(folder / "reference", target.pipeline)

    assert f"what differs now: {target.differs}" in continued.said
    assert "this run is equivalent, not bit-identical" in continued.said
    if config.pipeline.schedule == "pipedream":
        replicas = config.pipeline.replicas or config.pipeline.stage_count or len(config.pipeline.balance)
        assert_same(continued.outcome, replay(config, replicas, begin=CUT, start=start))
    else:
        _assert_follows(continued.outcome, train_plainly(config, begin=CUT, start=start))


def _assert_follows(found: Outcome, expected: Outcome) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert_close(found.weights, expected.weights, rtol=1e-4, atol=1e-6)
    assert_close(found.buffers, expected.buffers, rtol=1e-4, atol=1e-6)
    assert_close(found.state["momentum_buffer"], expected.state["momentum_buffer"], rtol=1e-3, atol=1e-5)
