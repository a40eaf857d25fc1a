from __future__ import annotations

import subprocess
import sys
import textwrap


def _run(code: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)


def test_a_call_that_never_returns_and_holds_the_lock_of_python_ends_with_a_traceback() -> None:
    shown = _run(
        """
        import ctypes
        from hpcpipe.transport.deadline import limited

        def finalise() -> None:
            # PyDLL keeps the lock in the call, as calls into MPI do.
            ctypes.PyDLL(None).pause()

        with limited(0.2):
            finalise()
        """
    )

    assert shown.returncode == 1
    assert "in finalise" in shown.stderr


def test_a_call_that_returns_in_time_is_not_ended() -> None:
    shown = _run(
        """
        import time
        from hpcpipe.transport.deadline import limited

        with limited(0.2):
            pass
        with limited(None):
            time.sleep(0.4)
        """
    )

    assert (shown.returncode, shown.stderr) == (0, "")


def test_an_end_within_seconds_needs_nobody_to_agree() -> None:
    shown = _run(
        """
        import ctypes
        from hpcpipe.transport.deadline import end_within

        end_within(1)
        libc = ctypes.PyDLL(None)
        while True:
            libc.pause()
        """
    )

    assert shown.returncode == -14
