"""The tool that fuzzes for as long as one likes: it runs, notices what a reader may do wrong, and repeats it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "fuzz_reader.py"


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


def test_it_counts_what_it_has_tried_and_repeats_one_input(tmp_path: Path) -> None:
    done = _run(str(TOOL), "--minutes", "0.02", "--only", "topology.json", "--out", str(tmp_path / "findings"))
    assert done.returncode == 0, done.stderr
    name, count, *rest = done.stdout.split()
    assert (name, rest) == ("topology.json", ["inputs,", "0", "findings"])
    assert int(count) > 0
    assert not (tmp_path / "findings").exists()

    again = _run(str(TOOL), "--case", "topology.json:0")
    assert again.stdout == "topology.json:0: is read, or refused in one line\n", again.stderr


def test_it_notices_crashes_hangs_hunger_and_exceptions(tmp_path: Path) -> None:
    faults = {
        "None": "None",
        "os.abort()": "ended by SIGABRT",
        "time.sleep(60)": "ended by SIGALRM",
        "bytearray(8 << 30)": "MemoryError",
        "{}[data]": "KeyError: b''",
    }
    program = (
        "import importlib.util, os, sys, time\n"
        "from pathlib import Path\n"
        f"spec = importlib.util.spec_from_file_location('tool', {str(TOOL)!r})\n"
        "tool = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(tool)\n"
        "from tests.fuzz.targets import Target\n"
        "tool.SECONDS_PER_INPUT = 1\n"
        "for body in sys.argv[2:]:\n"
        "    target = Target('x', lambda rng: b'', eval('lambda data: ' + body))\n"
        "    count, fault = tool._batch(target, 0, 0, 0.0, Path(sys.argv[1]))\n"
        "    print(count, str(fault).splitlines()[-1])\n"
    )
    done = _run("-c", program, str(tmp_path), *faults)
    assert done.stdout.splitlines() == [f"1 {fault}" for fault in faults.values()], done
