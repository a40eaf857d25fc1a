"""Every way in which the extension module can be missing or wrong ends in a reason, never in an exception."""

from __future__ import annotations

import importlib.machinery
import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hpcpipe
from hpcpipe.native import loader

SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]
HERE = Path(loader.__file__).parent
BUILT = HERE / f"_core{SUFFIX}"


def record(directory: Path, **content: object) -> None:
    (directory / loader.BUILD_RECORD).write_text(json.dumps(content), encoding="utf-8")


def test_a_module_that_was_never_built_is_a_reason(tmp_path: Path) -> None:
    assert loader.load(tmp_path, "1.0") == (None, "it was not built; install hpcpipe again")


def test_the_reason_of_a_failed_build_is_kept(tmp_path: Path) -> None:
    record(tmp_path, built=False, reason="no C++ compiler was found")
    assert loader.load(tmp_path, "1.0") == (None, "it was not built: no C++ compiler was found")


def test_a_module_for_another_python_names_both(tmp_path: Path) -> None:
    record(tmp_path, built=True, python="3.99.1")
    (tmp_path / "_core.cpython-399-x86_64-linux-gnu.so").write_bytes(b"")

    module, reason = loader.load(tmp_path, "1.0")

    assert module is None
    assert reason is not None
    assert f"built for Python 3.99.1, this is {platform.python_version()}" in reason


def test_a_damaged_module_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / f"_core{SUFFIX}").write_bytes(b"not a shared object")
    record(tmp_path, built=True, python="3.10.2")

    module, reason = loader.load(tmp_path, "1.0")

    assert module is None
    assert reason is not None
    assert f"_core{SUFFIX} cannot be loaded" in reason
    assert "built for Python 3.10.2" in reason


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to make the broken module with")
def test_an_undefined_symbol_is_a_reason_that_names_it(tmp_path: Path) -> None:
    source = tmp_path / "broken.c"
    source.write_text(
        "extern void *nowhere_to_be_found(void); void *PyInit__core(void) { return nowhere_to_be_found(); }"
    )
    command = ["cc", "-shared", "-fPIC", str(source), "-o", str(tmp_path / f"_core{SUFFIX}")]
    subprocess.run(command, check=True, timeout=60)

    module, reason = loader.load(tmp_path, "1.0")

    assert module is None
    assert reason is not None
    assert "nowhere_to_be_found" in reason
    assert loader.MODULE not in sys.modules or sys.modules[loader.MODULE].__file__ != str(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"python": '])
def test_an_unreadable_build_record_is_an_empty_one(tmp_path: Path, content: str) -> None:
    (tmp_path / loader.BUILD_RECORD).write_text(content, encoding="utf-8")
    assert loader.read_build_record(tmp_path) == {}


def test_the_digest_notices_every_change_of_a_source(tmp_path: Path) -> None:
    assert loader.sources_digest(tmp_path) is None
    seen = set()
    for name, content in [("a.h", "1"), ("a.h", "2"), ("b.cu", "2"), ("b.cpp", ""), ("notes.txt", "ignored")]:
        (tmp_path / name).write_text(content)
        seen.add(loader.sources_digest(tmp_path))
    assert len(seen) == 4


def load_elsewhere(directory: Path, version: str) -> str:
    """The outcome of a load in a process of its own: two copies of one module do not belong into one."""
    program = (
        "import sys, pathlib; from hpcpipe.native import loader;"
        "module, reason = loader.load(pathlib.Path(sys.argv[1]), sys.argv[2]);"
        "print(reason if module is None else module.__name__)"
    )
    command = [sys.executable, "-c", program, str(directory), version]
    return subprocess.run(
        command, cwd=HERE.parents[1], capture_output=True, text=True, timeout=60, check=True
    ).stdout.strip()


@pytest.mark.skipif(not BUILT.exists(), reason="the extension is not built")
def test_a_module_left_over_from_another_version_or_other_sources_is_not_used(tmp_path: Path) -> None:
    shutil.copy(BUILT, tmp_path)
    assert load_elsewhere(tmp_path, hpcpipe.__version__) == loader.MODULE
    assert load_elsewhere(tmp_path, "99.0").startswith(
        f"the extension was built for hpcpipe {hpcpipe.__version__}, this is 99.0"
    )
    (tmp_path / "call.h").write_text("changed")
    assert "built from other sources" in load_elsewhere(tmp_path, hpcpipe.__version__)


def test_torch_need_not_be_imported_first() -> None:
    program = (
        "import sys; from hpcpipe.native import loader; import pathlib, hpcpipe;"
        "loader.load(pathlib.Path(loader.__file__).parent, hpcpipe.__version__);"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], cwd=HERE.parents[1], timeout=60, check=True)
