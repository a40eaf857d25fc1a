"""hpcpipe on ranks of which one gets a signal early: `early_signal.py SIGNAL RANK MODULE ARGUMENTS...`.

That rank gets it at the moment at which it is about to import MODULE.
"""

from __future__ import annotations

import os
import signal
import sys

from hpcpipe.cli.main import main
from hpcpipe.transport.launcher import launcher_rank


class Sender:
    """Looks for modules like every other finder, and finds none."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == MODULE:
            print(f"signal before {name}", flush=True)
            os.kill(os.getpid(), signal.Signals[SIGNAL])


if __name__ == "__main__":
    SIGNAL, RANK, MODULE = sys.argv[1:4]
    del sys.argv[1:4]
    if launcher_rank(os.environ) == int(RANK):
        sys.meta_path.insert(0, Sender())
    main()
