from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tools import slurm_box
from tools.slurm_box import Box, Refused, free_ports, is_free, main, range_of, rendered, running


def settings_of(text: str) -> dict[str, str]:
    """The settings of a slurm.conf; of nodes and partitions, those of their lines together."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return dict(word.split("=", 1) for line in lines for word in line.split())


@pytest.mark.parametrize(("nodes", "names", "ports"), [(1, "n0", "19001"), (2, "n[0-1]", "[19001-19002]")])
def test_a_configuration_names_nodes_ports_and_files_of_its_folder(nodes: int, names: str, ports: str) -> None:
    text = rendered(
        Path("/somewhere"), nodes=nodes, cpus=4, controller_port=19000, first_node_port=19001, memory_mb=999
    )
    settings = settings_of(text)

    assert settings["NodeName"] == names
    assert settings["Port"] == ports
    assert settings["SlurmctldPort"] == "19000"
    assert settings["CPUs"] == "4"
    assert settings["RealMemory"] == "999"
    paths = re.findall(r"(?<==)/[^\s,]*", text)
    assert {path.split("/")[1] for path in paths} == {"somewhere", "bin"}
    assert settings["AuthInfo"].startswith("socket=/somewhere/munge/socket,")


def test_a_range_of_one_is_written_without_brackets() -> None:
    assert [range_of(0, 1), range_of(7, 3)] == ["0", "[7-9]"]


def test_ports_are_free_ones_in_a_row() -> None:
    taken = set(slurm_box.PORTS) - {20000, 20001, 25000, 25001, 25002}

    assert free_ports(3, lambda port: port not in taken) == 25000


def test_no_free_ports_are_an_error_of_one_line() -> None:
    with pytest.raises(Refused, match="no 3 free ports in a row"):
        free_ports(3, lambda port: port % 3 != 0)


def test_a_port_on_which_somebody_listens_is_not_free() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]

        assert not is_free(port)


@pytest.mark.parametrize(
    ("there", "told"),
    [
        ((), "install munge and slurm-wlm"),
        (("munged",), "slurmctld, slurmd, sinfo, squeue, scancel: not found; install slurm-wlm"),
        (("slurmctld", "slurmd", "sinfo", "squeue", "scancel"), "munged: not found; install munge"),
    ],
    ids=["nothing", "munge", "Slurm"],
)
def test_missing_programs_are_named_with_their_packages_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: tuple[str, ...], told: str
) -> None:
    for name in there:
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setattr(slurm_box, "SYSTEM_PATH", str(tmp_path))

    check_refused(start_in(tmp_path / "box"), told)
    assert not (tmp_path / "box").exists()


@pytest.fixture
def with_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a stand-in for each program, which does nothing, on the path instead of the real ones."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in slurm_box.PROGRAMS:
        stand_in(programs / name, "")
    monkeypatch.setattr(slurm_box, "SYSTEM_PATH", str(programs))
    # Nobody opens a socket, so a longer folder than that of a real box will do.
    monkeypatch.setattr(slurm_box, "LONGEST_FOLDER", 1000)
    return programs


def stand_in(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def start_in(folder: Path) -> Result:
    return CliRunner().invoke(main, ["start", "--dir", str(folder)])


def check_refused(done: Result, told: str) -> None:
    assert done.exit_code == 2, done.output
    assert done.output.count("\n") == 1
    assert told in done.output


def test_a_folder_too_deep_for_sockets_is_refused(
    tmp_path: Path, with_programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_box, "LONGEST_FOLDER", 60)

    check_refused(start_in(tmp_path / ("deep" * 20)), "too long for sockets")


@pytest.mark.parametrize("name", ["a b", "a,b", "a#b", "a%n"])
def test_a_folder_whose_name_slurm_would_misread_is_refused(
    tmp_path: Path, with_programs: Path, name: str
) -> None:
    check_refused(start_in(tmp_path / name), "give a --dir of letters and digits")


def test_what_is_not_a_box_is_left_alone(tmp_path: Path, with_programs: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "precious").touch()

    check_refused(start_in(tmp_path), "has a state that is not a box's")
    assert (tmp_path / "state" / "precious").exists()


def test_a_pid_file_whose_number_went_to_another_process_names_no_daemon(tmp_path: Path) -> None:
    pid_file = tmp_path / "daemon"
    pid_file.write_text(f"{os.getppid()}\n")

    assert running(Box(tmp_path), pid_file) is None
    assert running(Box(tmp_path), tmp_path / "none") is None


def test_a_daemon_that_does_not_start_is_named_with_the_ends_of_the_logs(
    tmp_path: Path, with_programs: Path
) -> None:
    stand_in(with_programs / "munged", "echo no munged today; exit 7")

    done = start_in(tmp_path / "box")

    assert done.exit_code == 1
    assert done.output.startswith("Error: munged did not start (7)\n")
    assert "no munged today" in done.output


def test_nodes_that_do_not_come_up_are_told_with_the_ends_of_the_logs(
    tmp_path: Path, with_programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_box, "START_LIMIT_S", 0.1)
    stand_in(with_programs / "sinfo", "echo n0=idle; echo n1=down")
    stand_in(with_programs / "slurmd", "echo started as $4")

    done = start_in(tmp_path / "box")

    assert done.exit_code == 1
    assert done.output.startswith("Error: the nodes were not idle after 0.1 s: n0=idle n1=down\n")
    assert "started as n1" in done.output


def test_a_second_start_in_the_same_folder_begins_anew_and_keeps_the_logs(
    tmp_path: Path, with_programs: Path
) -> None:
    stand_in(with_programs / "sinfo", "echo n0=idle; echo n1=idle")
    first = start_in(tmp_path)
    (tmp_path / "state" / "jobs").touch()
    (tmp_path / "log" / "slurmctld").touch()
    second = start_in(tmp_path)

    assert (first.exit_code, second.exit_code) == (0, 0)
    assert not (tmp_path / "state" / "jobs").exists()
    assert (tmp_path / "log" / "slurmctld").exists()
