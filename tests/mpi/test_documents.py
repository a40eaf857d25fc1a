"""What the documents show as programs is run as it stands there."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.mpi.launch import ROOT, run

BRING_YOUR_MODEL = (ROOT / "docs" / "bring-your-model.md").read_text(encoding="utf-8")


def files_in(text: str) -> dict[str, str]:
    """Code blocks whose first line is a comment with a file's name, by that name."""
    blocks = re.findall(r"^```\w+\n(# ([\w.]+)\n.*?)^```", text, re.DOTALL | re.MULTILINE)
    return {name: block for block, name in blocks}


def test_the_model_of_ones_own_in_the_documents_trains(tmp_path: Path) -> None:
    files = files_in(BRING_YOUR_MODEL)
    assert sorted(files) == ["mine.toml", "mymodel.py"]
    for name, block in files.items():
        (tmp_path / name).write_text(block)

    result = run(["-m", "hpcpipe", "train", "mine.toml", "--overwrite"], 3, cwd=tmp_path, timeout_s=120)

    assert result.rc == 0, str(result)
    summary = json.loads((tmp_path / "runs" / "mine" / "summary.json").read_text())
    assert summary["figures"]["eval_second_guess"] >= summary["figures"]["eval_accuracy"] > 0.5
