"""Which run a checkpoint set is of: the id of a run in its folder (`run.json`) and in the meta of every set.

A run keeps its id as long as it goes on in its folder. Sets that were copied in from elsewhere have another one;
sets without any are taken for the folder's own.
"""

from __future__ import annotations

import json
import re
import secrets
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcpipe.durable import replace_file
from hpcpipe.errors import CheckpointError
from hpcpipe.untrusted import parse_json, read_plain

RUN_NAME = "run.json"
SETS_NAME = "checkpoints"
_FORMAT = "hpcpipe run"
_ID = re.compile(r"[0-9a-f]{16}")
_MAX_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run's id (16 hexadecimal digits) and, if it began with a checkpoint of another run, a line on which."""

    id: str
    origin: str | None = None

    @classmethod
    def new(cls, origin: str | None = None) -> Run:
        """A run with an id of its own."""
        return cls(id=secrets.token_hex(8), origin=origin)


def read_run(folder: Path) -> Run | None:
    """The run in `folder`; None if none is noted there.

    Raises:
        CheckpointError: `run.json` cannot be read, or is not one.
    """
    path = folder / RUN_NAME
    try:
        document = parse_json(read_plain(path, _MAX_BYTES))
        run = Run(id=document["run"], origin=document["origin"])
        if document != _document(run) or not _ID.fullmatch(run.id):
            raise ValueError("it names no run, or is damaged")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{path}: does not say which run is in this folder; remove it, and --resume auto goes by the newest "
            "checkpoint"
        ) from error
    return run


def write_run(folder: Path, run: Run) -> None:
    """Note `run` in `folder`. Raises OSError."""
    replace_file(folder / RUN_NAME, (json.dumps(_document(run)) + "\n").encode())


def _document(run: Run) -> dict[str, Any]:
    # With a checksum: by one wrong digit every set in the folder would become another run's.
    crc = zlib.crc32(f"{run.id} {run.origin}".encode())
    return {"format": _FORMAT, "run": run.id, "origin": run.origin, "crc": crc}


def run_of(meta: Mapping[str, Any]) -> str | None:
    """The id of the run that wrote a set with this meta; None if it names none."""
    found = meta.get("run")
    return found if isinstance(found, str) and _ID.fullmatch(found) else None


def home_of(root: Path) -> str | None:
    """The id of the run whose sets belong below `root`; None where that is no run's folder, or not noted.

    Raises:
        CheckpointError: as `read_run`.
    """
    run = read_run(root.parent) if root.resolve().name == SETS_NAME else None
    return None if run is None else run.id


def strangeness(path: Path, meta: Mapping[str, Any], home: str | None) -> str | None:
    """Why the set at `path` with this meta is not of the run `home`; None if it is, or nothing is known."""
    found = run_of(meta)
    if home is None or found is None or found == home:
        return None
    return f"{path}: is of another run ({found}), not of the run in this folder ({home})"
