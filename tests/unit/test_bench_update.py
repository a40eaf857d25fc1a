"""The update benchmark reports its keys; its figures are for people, not for tests."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from hpcpipe.bench.update import bench_update, update
from hpcpipe.errors import ConfigError
from hpcpipe.optim import native

pytestmark = pytest.mark.skipif(native.available() is not None, reason=f"no extension: {native.available()}")

KEYS = {
    "speedup_over_torch",
    "fraction_of_triad",
    "ours_ms",
    "torch_ms",
    "triad_ms",
    "triad_gb_s",
    "torch_variant",
}


def test_each_thread_count_has_its_figures_and_thread_settings_come_back() -> None:
    before = torch.get_num_threads(), native.extension().get_threads()
    result = bench_update(parameters=100_000, threads=(1, 2), repeats=2)
    assert (torch.get_num_threads(), native.extension().get_threads()) == before
    assert set(result["threads"]) == {"1", "2"}
    for row in result["threads"].values():
        assert set(row) == KEYS
        assert row["torch_variant"].startswith("SGD(")
        assert all(row[key] > 0 for key in KEYS - {"torch_variant"})
    assert result["parameters"] <= 100_000


def test_the_command_prints_a_line_per_thread_count_or_one_json_object() -> None:
    arguments = ["--parameters", "2048", "--threads", "1", "--repeats", "1"]
    plain = CliRunner().invoke(update, arguments, catch_exceptions=False)
    assert "1 thread:" in plain.output
    assert "of a triad at" in plain.output
    as_json = CliRunner().invoke(update, [*arguments, "--json"], catch_exceptions=False)
    assert set(json.loads(as_json.output)["threads"]["1"]) == KEYS


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="1024 or more parameters"):
        bench_update(parameters=10)
    with pytest.raises(ConfigError, match="needs the compiled update"):
        bench_update(parameters=2048, device="meta")
