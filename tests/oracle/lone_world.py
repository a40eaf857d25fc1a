"""A world of one rank without MPI: what `hpcpipe.engine.train` needs to run all stages in this process."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from hpcpipe.transport.wait import Waiter
from hpcpipe.transport.world import World


class LoneWorld(World):
    """Collectives of one rank; JSON goes through text as it does on the wire."""

    def __init__(self) -> None:
        self.rank = 0
        self.size = 1
        self.local_rank = 0
        self.host = "here"
        self.hosts = ["here"]
        self.library = "no MPI"
        self.thread_level = "multiple"
        self.memory_kinds = None
        self.remarks = []
        self.tag_limit = 2**20
        self.waiter = Waiter(rank=0)

    def broadcast_json(self, value: Any, *, what: str) -> Any:
        return json.loads(json.dumps(value))

    def gather_json(self, value: Any, *, what: str) -> list[Any]:
        return [json.loads(json.dumps(value))]

    def all_gather_json(self, value: Any, *, what: str) -> list[Any]:
        return [json.loads(json.dumps(value))]

    def all_reduce_sum(self, array: npt.NDArray[Any], *, what: str) -> npt.NDArray[Any]:
        return np.array(array)

    def barrier(self, what: str) -> None:
        return

    def abort(self, code: int) -> NoReturn:
        raise AssertionError(f"the engine aborted the job with code {code}")
