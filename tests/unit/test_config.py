from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from hpcpipe.config import (
    AdamwConfig,
    ParameterGroup,
    RunConfig,
    SgdConfig,
    StepRate,
    UserModel,
    VggModel,
    group_of,
    load_run,
    parse_run,
)
from hpcpipe.config import toml as emitter
from hpcpipe.config.explain import members_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MINIMAL: dict[str, Any] = {"model": {"name": "mlp"}, "data": {"name": "digits"}, "optimizer": {"lr": 0.1}}
FULL = """
[run]
seed = 7
epochs = 3
max_steps = 100
threads = 2
stop_signals = "SIGUSR1"
[model]
name = "mypkg.mymodule:build"
widths = [64, 32]
title = 'a "quoted" name\\'
options = { depth = 2, "odd key" = [1.5, true] }
[loss]
metrics = ["accuracy", "mypkg.mymodule:top5"]
ignore_index = -100
[data]
name = "text"
sequence = 64
batch = 8
[pipeline]
policy = "stash"
balance = [1, 2]
replicas = [2, 1]
[optimizer]
name = "adamw"
lr = 1e-5
betas = [0.9, 0.95]
groups = [{ match = "*.bias", weight_decay = 0.0 }, { match = "head.*", lr_scale = 0.5 }]
[lr_schedule]
name = "step"
step_every = 10
[checkpoint]
auto = true
mtbf_hours = 24
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "my-job.toml"
    path.write_text(FULL, encoding="utf-8")
    return path


def test_a_configuration_written_as_toml_loads_as_an_equal_one(run_file: Path, tmp_path: Path) -> None:
    config = load_run(run_file)
    written = tmp_path / "run.toml"
    written.write_text(config.to_toml(), encoding="utf-8")

    assert load_run(written) == config


def test_a_configuration_survives_a_journey_as_json(run_file: Path) -> None:
    config = load_run(run_file)

    sent = json.dumps(config.model_dump(mode="json", exclude_none=True))

    assert parse_run(json.loads(sent)) == config


def test_what_is_left_out_gets_its_default_and_the_run_file_names_the_folder(run_file: Path) -> None:
    config = load_run(run_file)

    assert config.run.out == "runs/my-job"
    assert config.run.stop_signals == ("SIGUSR1",)
    assert config.pipeline.target == "round_trip"
    assert config.data.eval_rows == config.data.batch == 8
    assert config.lr_schedule == StepRate(step_every=10, gamma=0.1)


def test_each_name_picks_the_keys_of_its_own_section() -> None:
    sgd = parse_run(MINIMAL)
    adamw = parse_run(MINIMAL | {"optimizer": {"name": "adamw", "lr": 1}, "model": {"name": "vgg11"}})

    assert sgd.optimizer == SgdConfig(lr=0.1, momentum=0.9)
    assert isinstance(adamw.optimizer, AdamwConfig)
    assert adamw.optimizer.weight_decay == 0.01
    assert isinstance(adamw.model, VggModel)


def test_a_name_alone_stands_for_a_section_with_that_name() -> None:
    config = parse_run(MINIMAL | {"model": "mypkg.mymodule:build", "data": "digits"})

    assert config.model == UserModel(name="mypkg.mymodule:build")


def test_a_users_builder_gets_its_arguments_as_they_were_written(run_file: Path) -> None:
    model = load_run(run_file).model

    assert isinstance(model, UserModel)
    assert model.arguments == {
        "widths": [64, 32],
        "title": 'a "quoted" name\\',
        "options": {"depth": 2, "odd key": [1.5, True]},
    }


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("optimizer.lr=0.5", ("optimizer", "lr"), 0.5),
        ("optimizer.lr=.5", ("optimizer", "lr"), 0.5),
        ("optimizer.lr = 1e-3", ("optimizer", "lr"), 1e-3),
        ("run.trace=true", ("run", "trace"), True),
        ("run.device=cpu", ("run", "device"), "cpu"),
        ('run.out="with=equals"', ("run", "out"), "with=equals"),
        ("run.out=/tmp/a b=c", ("run", "out"), "/tmp/a b=c"),
        ("run.out=x\ny = 1", ("run", "out"), "x\ny = 1"),
        ("pipeline.balance=[2,2]", ("pipeline", "balance"), (2, 2)),
        ("optimizer.groups=[{match='*'}]", ("optimizer", "groups"), (ParameterGroup(match="*"),)),
        ("eval.every=5", ("eval", "every"), 5),
    ],
)
def test_an_override_wins_over_the_file(override: str, key: tuple[str, str], value: object) -> None:
    config = parse_run(MINIMAL | {"run": {"device": "cuda", "trace": False}}, overrides=[override])

    assert getattr(getattr(config, key[0]), key[1]) == value


def test_the_last_of_two_overrides_wins() -> None:
    assert parse_run(MINIMAL, overrides=["run.seed=1", "run.seed=2"]).run.seed == 2


def test_an_override_may_change_one_key_of_a_users_table() -> None:
    model = {"name": "mypkg.mymodule:build", "options": {"depth": 2, "width": 3}}
    config = parse_run(MINIMAL | {"model": model}, overrides=["model.options.depth=4"])

    assert config.model.arguments == {"options": {"depth": 4, "width": 3}}
    assert model["options"] == {"depth": 2, "width": 3}


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        parse_run(MINIMAL).run.seed = 3  # type: ignore[misc]


def test_prediction_without_momentum_is_fine_where_nothing_is_predicted() -> None:
    still = {"optimizer": {"lr": 0.1, "momentum": 0.0}}
    for pipeline in ({"policy": "stash"}, {"schedule": "gpipe"}, {"stages": 1}, {"replicas": [4]}):
        assert parse_run(MINIMAL | still | {"pipeline": pipeline}).optimizer.lr == 0.1


def test_replicas_decide_the_number_of_stages() -> None:
    config = parse_run(MINIMAL, overrides=["pipeline.replicas=[3,1]", "pipeline.balance=[2,2]"])

    assert config.pipeline.replicas == (3, 1)
    assert config.pipeline.stage_count == 2
    assert parse_run(MINIMAL).pipeline.stage_count is None


@pytest.mark.parametrize("size", ["40GiB", "1.5 GB", "512MB", "900kB", "2TiB"])
def test_a_memory_limit_is_a_size_with_its_unit(size: str) -> None:
    assert parse_run(MINIMAL | {"pipeline": {"plan": "auto", "memory_limit": size}}).pipeline.memory_limit == size


def test_the_first_group_whose_pattern_fits_takes_a_parameter() -> None:
    groups = [ParameterGroup(match="*.bias"), ParameterGroup(match="block1.*")]

    found = [group_of(name, groups) for name in ("block1.linear.bias", "block1.linear.weight", "head.weight")]

    assert found == [1, 2, 0]


def every_section(model: type[BaseModel]) -> list[type[BaseModel]]:
    return [ParameterGroup, *(member for name in model.model_fields for member in members_of(name))]


def test_every_key_has_a_description() -> None:
    bare = [
        f"{section.__name__}.{name}"
        for section in every_section(RunConfig)
        for name, field in section.model_fields.items()
        if not field.description
    ]

    assert bare == []


toml_values = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(st.text(), st.dictionaries(st.text(), toml_values, max_size=3), max_size=2))
def test_whatever_toml_can_hold_is_written_so_that_it_reads_the_same(tables: dict[str, dict[str, Any]]) -> None:
    assert tomllib.loads(emitter.dump(tables)) == tables


def test_loading_a_run_file_imports_neither_torch_nor_mpi(run_file: Path) -> None:
    program = (
        "import sys; from hpcpipe.config import load_run; load_run(sys.argv[1]).to_toml(); "
        "print([name for name in ('torch', 'mpi4py', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(run_file)], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("overrides", "plan", "balance"),
    [
        (["pipeline.plan='p.json'"], "p.json", "parameters"),
        (["pipeline.plan=auto"], "auto", "parameters"),
        (["pipeline.policy=stash"], None, (1, 1)),
    ],
)
def test_a_plan_on_the_command_line_takes_the_place_of_the_files_own_split(
    overrides: list[str], plan: str | None, balance: str | tuple[int, ...]
) -> None:
    config = parse_run(MINIMAL | {"pipeline": {"stages": 2, "balance": [1, 1]}}, overrides=overrides)

    assert (config.pipeline.plan, config.pipeline.balance) == (plan, balance)
    assert config.pipeline.stages == (2 if plan is None else None)


def test_a_split_on_the_command_line_takes_the_place_of_the_files_plan() -> None:
    tables = MINIMAL | {"pipeline": {"plan": "auto", "memory_limit": "1GiB"}}

    config = parse_run(tables, overrides=["pipeline.replicas=[2, 1]"])

    assert (config.pipeline.plan, config.pipeline.memory_limit) == (None, None)
    assert config.pipeline.replicas == (2, 1)
