"""Tests of the rule that CI skips nothing, by running pytest on small suites with this suite's conftest."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run_suite(folder: Path, files: dict[str, str], *, ci: bool) -> tuple[int, str]:
    shutil.copy(HERE / "conftest.py", folder)
    (folder / "pytest.ini").write_text(
        "[pytest]\nmarkers = needs_gpu: x\naddopts = --import-mode=importlib -p no:cacheprovider\n"
    )
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    environment = {
        **os.environ,
        "CI": "true" if ci else "",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(HERE.parent),
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-ra", "."],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr


SKIPS = "import pytest\ndef test_it():\n    pytest.skip('nothing to talk to')\n"
MODULE_SKIPS = "import pytest\npytest.importorskip('no_such_module')\ndef test_it(): pass\n"
FAILS_AS_EXPECTED = "import pytest\n@pytest.mark.xfail(strict=True)\ndef test_it(): assert False\n"


def test_a_skip_is_shown_with_its_reason_outside_ci(tmp_path: Path) -> None:
    code, output = run_suite(tmp_path, {"test_a.py": SKIPS}, ci=False)

    assert code == 0
    assert "nothing to talk to" in output


@pytest.mark.parametrize("text", [SKIPS, MODULE_SKIPS], ids=["test", "module"])
def test_a_skip_in_ci_is_a_failure_with_its_reason(tmp_path: Path, text: str) -> None:
    code, output = run_suite(tmp_path, {"test_a.py": text}, ci=True)

    assert code in (1, 2)
    assert "which CI does not allow" in output
    assert "nothing to talk to" in output or "no_such_module" in output


def test_only_tests_of_a_gpu_may_be_skipped_in_ci(tmp_path: Path) -> None:
    files = {"gpu/test_a.py": "def test_it(): assert False\n", "gpu/test_b.py": MODULE_SKIPS}

    code, output = run_suite(tmp_path, {**files, "test_c.py": FAILS_AS_EXPECTED}, ci=True)

    assert code == 0, output
    assert "no CUDA device" in output
