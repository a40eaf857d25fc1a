"""The build of the extension: optional unless asked for, and a failure is recorded in one line."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpcpipe.optim import native

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("setuptools") is None, reason="setuptools is not installed in this environment"
)


@pytest.mark.skipif(native.available() is not None, reason=f"no extension: {native.available()}")
def test_where_nvcc_exists_the_extension_holds_kernels_for_a100_and_h100() -> None:
    cuda = native.build_record()["cuda"]
    if shutil.which("nvcc") is None or os.environ.get("HPCPIPE_CUDA") == "0":
        assert cuda.startswith(("on: ", "off: "))
        return
    assert cuda.startswith("on: ")
    if "HPCPIPE_CUDA_ARCHITECTURES" not in os.environ:
        content = Path(native.extension().__file__).read_bytes()
        for architecture in (b"sm_80", b"sm_90"):
            assert architecture in content


def build_without_tools(target: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run setup.py's build_ext where neither cmake nor a compiler can be found."""
    command = [sys.executable, "-W", "ignore", "setup.py", "build_ext", "--build-lib", str(target / "lib")]
    return subprocess.run(
        [*command, "--build-temp", str(target / "temp")],
        cwd=ROOT,
        env={**os.environ, "PATH": str(target), "CXX": "no-such-compiler", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_without_tools_the_build_goes_on_with_one_line_and_a_record(tmp_path: Path) -> None:
    done = build_without_tools(tmp_path)

    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("hpcpipe:")]
    assert len(lines) == 1
    assert "installing without the extension" in lines[0]
    record = json.loads((tmp_path / "lib" / "hpcpipe" / "native" / "_build.json").read_text())
    assert record["built"] is False
    assert record["reason"] in lines[0]


def test_where_the_extension_is_required_the_build_fails(tmp_path: Path) -> None:
    done = build_without_tools(tmp_path, HPCPIPE_REQUIRE_EXTENSION="1")

    assert done.returncode != 0
    assert "hpcpipe: the extension could not be built" in done.stderr
