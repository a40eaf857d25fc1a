from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcpipe.config import ParameterGroup, check_groups, load_run, parse_run
from hpcpipe.errors import ConfigError

MINIMAL: dict[str, Any] = {"model": {"name": "mlp"}, "data": {"name": "digits"}, "optimizer": {"lr": 0.1}}

MISTAKES = [
    ({"run": {"epoch": 3}}, 'run.epoch: no such key; did you mean "epochs"?'),
    ({"run": {"lr": 3}}, "run.lr: no such key; it belongs to [optimizer]"),
    ({"pipelines": {}}, 'pipelines: no such section; did you mean "pipeline"?'),
    ({"seed": 3}, "seed: no such section; as a key it belongs to [run]"),
    ({"run": 3}, "run: must be a table, got 3"),
    ({"run": {"epochs": 0}}, "run.epochs: must be at least 1, got 0"),
    ({"run": {"max_steps": 0}}, "run.max_steps: must be at least 1, got 0"),
    ({"run": {"seed": "a"}}, 'run.seed: must be a whole number, got "a"'),
    ({"run": {"epochs": True}}, "run.epochs: must be a whole number, got true"),
    ({"run": {"trace": 1}}, "run.trace: must be true or false, got 1"),
    ({"run": {"dtype": "float16"}}, 'run.dtype: must be "float32", "bfloat16" or "float64", got "float16"'),
    ({"run": {"stop_signals": ["SIGUSR"]}}, 'run.stop_signals: no such signal on this system: "SIGUSR"'),
    ({"run": {"stop_signals": ["SIGKILL"]}}, "run.stop_signals: SIGKILL cannot be caught"),
    ({"run": {"stall_abort_s": 5}}, "run.stall_abort_s: must be at least stall_warning_s (60), got 5"),
    ({"model": {}}, 'model.name: missing; must be "mlp", "vgg11", "vgg16" or "gpt", or your own as'),
    ({"model": {"name": "vgg19"}}, 'got "vgg19"; did you mean "vgg16"?'),
    ({"model": {"name": "mypkg.build"}}, 'your own as "mypkg.mymodule:build", got "mypkg.build"'),
    ({"model": 3}, "model: must be a table or a name, got 3"),
    ({"model": {"name": "mlp", "widht": 3}}, 'model.widht: no such key; did you mean "width"?'),
    ({"model": {"name": "mlp", "heads": 3}}, 'model.heads: no such key for "mlp"; name = "gpt" has it'),
    ({"model": {"name": "mlp", "hidden": [3], "width": 3}}, "model.hidden: already names every width"),
    ({"model": {"name": "mlp", "hidden": [3, 0]}}, "model.hidden[1]: must be at least 1, got 0"),
    ({"model": {"name": "vgg16", "size": 28}}, "model.size: must be a multiple of 32, got 28"),
    ({"model": {"name": "gpt", "width": 10, "heads": 4}}, "model.heads: must divide width (10), got 4"),
    ({"model": {"name": "mlp", "dropout": 1.0}}, "model.dropout: must be below 1, got 1.0"),
    ({"data": {"name": "txt"}}, 'got "txt"; did you mean "text"?'),
    ({"data": {"name": "text", "paht": "x"}}, 'data.paht: no such key; did you mean "path"?'),
    ({"data": {"name": "digits", "batch": 0}}, "data.batch: must be at least 1, got 0"),
    ({"data": {"name": "synthetic", "vocab": 9, "shape": [3, 4]}}, "data.shape: must be one length"),
    ({"loss": {"metrics": "acuracy"}}, 'got "acuracy"; did you mean "accuracy"?'),
    ({"loss": {"name": "my.mod:f", "ignore_index": 0}}, "loss.ignore_index: only cross_entropy knows it"),
    ({"pipeline": {"policy": "spectrian"}}, 'got "spectrian"; did you mean "spectrain"?'),
    ({"pipeline": {"balance": [2, 0]}}, 'pipeline.balance: must be "parameters" or the number of layers'),
    ({"pipeline": {"balance": "even"}}, 'as in [3, 2, 2], got "even"'),
    ({"pipeline": {"balance": [2, 2], "stages": 3}}, "pipeline.balance: has 2 counts for 3 stages"),
    ({"pipeline": {"replicas": []}}, "pipeline.replicas: must have 1 values, got 0"),
    ({"pipeline": {"replicas": [2, 0]}}, "pipeline.replicas[1]: must be at least 1, got 0"),
    ({"pipeline": {"replicas": 2}}, "pipeline.replicas: must be a list, got 2"),
    ({"pipeline": {"replicas": [3, 1], "stages": 3}}, "pipeline.replicas: is for 2 stages, but stages is 3"),
    ({"pipeline": {"replicas": [3, 1], "balance": [1, 1, 1]}}, "pipeline.balance: has 3 counts for 2 stages"),
    ({"pipeline": {"plan": ""}}, "pipeline.plan: must not be empty"),
    ({"pipeline": {"plan": "p.json", "stages": 2}}, "pipeline.plan: decides stages itself; remove it"),
    ({"pipeline": {"plan": "p.json", "balance": [2, 2], "replicas": [2, 1]}},
     "pipeline.plan: decides balance and replicas itself; remove them"),
    ({"pipeline": {"plan": "p.json", "memory_limit": "4GiB"}}, 'memory_limit: is kept by plan = "auto" only'),
    ({"pipeline": {"memory_limit": "4GiB"}}, 'pipeline.memory_limit: is kept by plan = "auto" only'),
    ({"pipeline": {"plan": "auto", "memory_limit": "40"}}, 'pipeline.memory_limit: must be a size with its unit'),
    ({"pipeline": {"microbatches": 4}}, "pipeline.microbatches: must be 1 with schedule pipedream"),
    ({"pipeline": {"schedule": "1f1b", "microbatches": 64}}, "64 microbatches need as many rows"),
    ({"optimizer": {}}, "optimizer.lr: missing (Learning rate before the schedule)"),
    ({"optimizer": {"name": "adam", "lr": 1}}, 'optimizer.name: must be "sgd" or "adamw", got "adam"'),
    ({"optimizer": {"lr": 1, "betas": [0.9, 0.9]}}, 'optimizer.betas: no such key; name = "adamw" has it'),
    ({"optimizer": {"lr": float("nan")}}, "optimizer.lr: must be a finite number, got nan"),
    ({"optimizer": {"lr": -1}}, "optimizer.lr: must be at least 0, got -1"),
    ({"optimizer": {"lr": 1, "momentum": 0}}, 'optimizer.momentum: is 0, so policy spectrain would predict'),
    ({"optimizer": {"name": "adamw", "lr": 1, "betas": [0, 0.9]}}, "optimizer.betas: is 0, so policy spectrain"),
    ({"optimizer": {"lr": 1, "nesterov": True, "dampening": 0.1}}, "optimizer.nesterov: needs momentum above 0"),
    ({"optimizer": {"lr": 1, "groups": [{"match": "*", "lr_scal": 2}]}}, 'groups[0].lr_scal: no such key'),
    ({"optimizer": {"lr": 1, "groups": [{"lr_scale": 2}]}}, "optimizer.groups[0].match: missing"),
    ({"lr_schedule": {"name": "cosin"}}, 'did you mean "cosine"?'),
    ({"lr_schedule": {"name": "step"}}, "lr_schedule.step_every: missing (Updates between two steps)"),
    ({"lr_schedule": {"gamma": 2.0}}, 'lr_schedule.gamma: no such key; name = "step" has it'),
    ({"lr_schedule": {"name": "cosine", "warmup": 9, "total": 9}}, "lr_schedule.warmup: must be below total (9)"),
    ({"checkpoint": {"auto": True}}, "checkpoint.mtbf_hours: auto = true needs it"),
    ({"checkpoint": {"auto": True, "mtbf_hours": 1, "every": 5}}, "checkpoint.auto: chooses the interval itself"),
    ({"transport": {"bucket_bytes": 0}}, "transport.bucket_bytes: must be at least 1, got 0"),
    ({"transport": {"chunk_bytes": 2**31}}, "transport.chunk_bytes: must be below 2147483648, got 2147483648"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("section", "expected"), MISTAKES, ids=[expected.split(";")[0] for _, expected in MISTAKES]
)
def test_a_mistake_is_one_line_with_file_key_and_remedy(section: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run(MINIMAL | section, source="job.toml")

    message = str(caught.value)
    assert message.startswith("job.toml: ")
    assert expected in message
    assert "\n" not in message


def test_several_mistakes_share_one_line() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run(MINIMAL | {"run": {"epochs": 0, "sed": 1}, "eval": {"evry": 1}}, source="job.toml")

    message = str(caught.value)
    assert message.count("job.toml") == 1
    assert message.count("; ") >= 4
    assert all(key in message for key in ("run.epochs", "run.sed", "eval.evry"))


def test_an_override_that_is_wrong_is_named_as_the_place() -> None:
    with pytest.raises(ConfigError, match=r'^--set: run.epochs: must be a whole number, got "many"$'):
        parse_run(MINIMAL, source="job.toml", overrides=["run.epochs=many"])


@pytest.mark.parametrize("override", ["optimizer.lr", "lr=3", ".lr=3", "optimizer.=3", "=3"])
def test_an_override_without_section_key_and_value_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=r"^--set .*must have the form section.key=value"):
        parse_run(MINIMAL, overrides=[override])


def test_an_override_below_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer.lr is no table"):
        parse_run(MINIMAL, overrides=["optimizer.lr.start=3"])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"[run]\nepochs = ten\n", "is not valid TOML: "),
        (b"[run]\nout = '\xff'\n", "is not UTF-8 text (byte 13)"),
        (b"", "model.name: missing"),
        (b"a = " + b"[" * 5000, "is not valid TOML: nested too deeply"),
        (b"a = " + b"9" * 5000, "is not valid TOML: "),
        (b"#" * (17 << 20), "longer than 16 MiB"),
        (b'"a\\n\\u001b[2J" = 1', "a\\n\\x1b[2J: "),
    ],
    ids=["no TOML", "no UTF-8", "empty", "deep", "many digits", "long", "commands to a terminal"],
)
def test_a_file_that_is_no_run_file_is_one_line(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(content)

    with pytest.raises(ConfigError) as caught:
        load_run(path)

    assert str(caught.value).startswith(f"{path}: ")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_override_that_is_no_text_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"--set run.out=\\udcff: is not UTF-8"):
        parse_run(MINIMAL, overrides=["run.out=\udcff"])
    with pytest.raises(ConfigError, match=r"^--set: optimizer.lr: "):
        parse_run(MINIMAL, overrides=["optimizer.lr=" + "[" * 5000])


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.toml: no such run file"):
        load_run(tmp_path / "nowhere.toml")
    with pytest.raises(ConfigError, match=r"cannot read the run file"):
        load_run(tmp_path)


def test_a_parameter_group_that_takes_nothing_is_refused() -> None:
    names = ["block1.weight", "block1.bias", "head.weight"]
    check_groups(names, [ParameterGroup(match="*.bias"), ParameterGroup(match="*.weight")])

    with pytest.raises(ConfigError, match=r'groups\[0\].match: no parameter of the model fits "\*.bais"'):
        check_groups(names, [ParameterGroup(match="*.bais")])
    with pytest.raises(ConfigError, match=r"groups\[1\].match: an earlier group takes every parameter that fits"):
        check_groups(names, [ParameterGroup(match="*"), ParameterGroup(match="*.bias")])
