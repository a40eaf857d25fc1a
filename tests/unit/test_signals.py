"""Stop signals in one process: when they count, how often, and what forked helpers make of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

import hpcpipe.engine.signals
from hpcpipe.engine.signals import DEFAULT_SIGNALS, StopSignals, stop_file
from tests.mpi.launch import ROOT, Result, run_alone
from tests.unit.forking import stay_in_c

COPIES_S = 0.15


class Ended(Exception):
    """Stands for the end of the process."""


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[StopSignals]:
    """Stop signals of this process, undone behind the test; a second SIGTERM raises `Ended`."""
    monkeypatch.setattr(hpcpipe.engine.signals, "COPIES_WITHIN_S", COPIES_S)
    wakeup = signal.set_wakeup_fd(-1)
    found = StopSignals()

    def end() -> NoReturn:
        raise Ended

    found.end_at_once = end
    try:
        yield found
    finally:
        # What has come is not to be raised again: it would end these tests.
        found._arrived.clear()
        found.listen(())
        signal.set_wakeup_fd(wakeup)


def asked_of(signals: StopSignals) -> list[int]:
    """The requests that come from here on."""
    asked: list[int] = []
    signals.direct_to(asked.append)
    return asked


def test_a_signal_that_came_before_anybody_listened_is_handed_over_once(signals: StopSignals) -> None:
    signals.listen(DEFAULT_SIGNALS)
    signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR1)

    assert asked_of(signals) == [signal.SIGUSR1]


def test_the_signals_of_the_run_file_take_over_from_the_default_ones(signals: StopSignals) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    signals.listen(DEFAULT_SIGNALS)
    signals.listen(["SIGUSR2"])
    asked = asked_of(signals)

    signal.raise_signal(signal.SIGUSR2)

    assert asked == [signal.SIGUSR2]
    assert signal.getsignal(signal.SIGUSR1) == before


def test_an_early_signal_that_turns_out_to_be_no_request_does_what_it_would_have_done(
    signals: StopSignals, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: done.append(number))
    try:
        signals.listen(DEFAULT_SIGNALS)
        signal.raise_signal(signal.SIGUSR1)
        assert done == []

        signals.listen(["SIGTERM"])

        assert done == [signal.SIGUSR1]
        assert asked_of(signals) == []
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_any_number_of_sigusr1_and_one_sigterm_ask_and_end_nothing(signals: StopSignals) -> None:
    signals.listen(DEFAULT_SIGNALS)
    asked = asked_of(signals)

    for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1):
        time.sleep(1.5 * COPIES_S)
        signal.raise_signal(number)

    assert asked == [signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1]


def test_copies_of_a_sigterm_are_one_and_a_later_one_is_the_second(signals: StopSignals) -> None:
    signals.listen(DEFAULT_SIGNALS)
    asked = asked_of(signals)

    for _ in range(3):
        signal.raise_signal(signal.SIGTERM)
    time.sleep(1.5 * COPIES_S)
    with pytest.raises(Ended):
        signal.raise_signal(signal.SIGTERM)

    assert asked == [signal.SIGTERM] * 3


def test_a_copy_that_arrives_in_a_long_computation_is_no_second_sigterm(signals: StopSignals) -> None:
    """The handler runs when the computation is over; what counts is when the signal came."""
    signals.listen(DEFAULT_SIGNALS)
    asked = asked_of(signals)
    signal.raise_signal(signal.SIGTERM)
    copy = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM))

    copy.start()
    stay_in_c(3 * COPIES_S)

    copy.join()
    assert asked == [signal.SIGTERM] * 2


def test_a_second_sigterm_before_mpi_has_started_ends_the_process_with_143_and_one_line() -> None:
    program = (
        "import os, signal, time\n"
        "from hpcpipe.engine.signals import DEFAULT_SIGNALS, StopSignals\n"
        "StopSignals().listen(DEFAULT_SIGNALS)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "time.sleep(1.1)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "time.sleep(60)\n"
    )

    result = run_alone(["-c", program], timeout_s=30)

    assert result.rc == 143, str(result)
    assert result.stderr == "hpcpipe: rank 0: a second SIGTERM before training began: ending at once\n"


def test_listening_needs_neither_torch_nor_numpy_nor_mpi() -> None:
    code = "import sys, hpcpipe.engine.signals; print({'torch', 'numpy', 'mpi4py'} & set(sys.modules))"

    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)

    assert shown.stdout == "set()\n"


def test_a_stop_file_is_looked_for_again_after_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    asked = stop_file(tmp_path)
    assert not asked()
    (tmp_path / "STOP").touch()

    assert not asked()
    now[0] += 1.0
    assert asked()


# -- forked helpers ----------------------------------------------------------------------------------------------


def forking(how: str) -> tuple[dict[str, Any], Result]:
    """What a program of `forking` found."""
    result = run_alone(["-m", "tests.unit.forking"], how, timeout_s=60)
    assert result.rc == 0, str(result)
    return json.loads(result.stdout.splitlines()[-1]), result


def test_a_forked_helper_outlives_signals_to_the_whole_group_but_not_a_sigterm_of_its_own() -> None:
    found, result = forking("bare")

    assert found == {"after all": None, "after its own": -signal.SIGTERM, "within": True}, str(result)
    assert "grandchild lives" in result.stdout


def test_a_helper_outlives_a_sigterm_to_the_group_that_it_or_its_rank_is_too_busy_to_handle() -> None:
    found, result = forking("busy")

    assert found == {"gone": [None, None]}, str(result)


def test_a_pool_of_processes_works_on_and_can_be_terminated() -> None:
    found, result = forking("pool")

    assert found == {"before": [4, 3, 2, 1], "after": [4, 3, 2, 1], "ended": True}, str(result)


def test_helpers_of_a_rank_that_leaves_obey_every_sigterm() -> None:
    found, result = forking("leaving")

    assert found == {"ended": True}, str(result)


def test_the_workers_of_a_data_loader_work_on_and_can_be_terminated() -> None:
    found, result = forking("loader")

    assert found == {"rows": list(range(12)), "code": 0, "ended": True}, str(result)
    assert "killed by signal" not in result.stderr


def test_programs_that_a_rank_or_a_helper_starts_inherit_nothing() -> None:
    found, result = forking("program")

    nothing = {"SigBlk": False, "SigIgn": False, "SigCgt": False}
    assert found == {"programs": [nothing, nothing]}, str(result)
