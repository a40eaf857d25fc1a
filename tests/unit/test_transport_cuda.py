from __future__ import annotations

import pytest

from hpcpipe.errors import ConfigError
from hpcpipe.transport.cuda import Awareness, detect, loaded_mpi_libraries, sums_device_memory

LIBRARY = "MPICH 5.0.2"


def _detect(setting: str = "auto", **kwargs: object) -> Awareness:
    defaults: dict[str, object] = {"environment": {}, "query": lambda: None, "has_cupy": True}
    return detect(setting, LIBRARY, **{**defaults, **kwargs})  # type: ignore[arg-type]


def test_a_library_that_says_nothing_is_not_given_device_memory() -> None:
    found = _detect()

    assert not found.enabled
    assert "does not say" in found.how


@pytest.mark.parametrize("yes", [True, False])
def test_the_query_of_the_library_decides_and_is_named(yes: bool) -> None:
    found = _detect(query=lambda: ("MPIX_Query_cuda_support", yes))

    assert found.enabled is yes
    assert found.how == f"MPIX_Query_cuda_support of {LIBRARY} says {'yes' if yes else 'no'}"


@pytest.mark.parametrize(("kinds", "yes"), [("mpi,system", False), ("system,cuda:device,mpi", True)])
def test_the_list_of_memory_kinds_decides_where_there_is_no_query(kinds: str, yes: bool) -> None:
    assert _detect(memory_kinds=kinds).enabled is yes


@pytest.mark.parametrize(
    "switch", ["MPICH_GPU_SUPPORT_ENABLED", "MPIR_CVAR_ENABLE_GPU", "PSP_CUDA", "MV2_USE_CUDA"]
)
def test_the_switch_of_a_library_without_query_counts(switch: str) -> None:
    assert _detect(environment={switch: "1"}).enabled
    assert not _detect(environment={switch: "0"}).enabled


def test_a_switch_to_off_overrules_a_query() -> None:
    found = _detect(environment={"MPIR_CVAR_ENABLE_GPU": "0"}, query=lambda: ("MPIX_GPU_query_support", True))

    assert not found.enabled
    assert found.how == "MPIR_CVAR_ENABLE_GPU=0"


def test_a_switch_to_on_does_not_overrule_a_query_that_says_no() -> None:
    assert not _detect(
        environment={"MPIR_CVAR_ENABLE_GPU": "1"}, query=lambda: ("MPIX_GPU_query_support", False)
    ).enabled


def test_the_setting_overrules_what_the_library_says() -> None:
    assert not _detect("off", query=lambda: ("MPIX_Query_cuda_support", True)).enabled
    assert _detect("on", query=lambda: ("MPIX_Query_cuda_support", False)).enabled


def test_without_cupy_auto_stages_and_on_is_refused() -> None:
    found = _detect(query=lambda: ("MPIX_Query_cuda_support", True), has_cupy=False)

    assert not found.enabled
    assert "CuPy is missing" in found.how
    with pytest.raises(ConfigError, match="needs CuPy"):
        _detect("on", has_cupy=False)


def test_another_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be one of auto, on, off"):
        _detect("maybe")


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize("value", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_an_allocator_that_loses_cuda_ipc_is_warned_about(variable: str, value: str) -> None:
    (warning,) = _detect("on", environment={variable: f"max_split_size_mb:64,{value}"}).warnings

    assert variable in warning
    assert "CUDA IPC" in warning


def test_the_loaded_library_is_found_in_a_memory_map() -> None:
    maps = [
        "7f0-7f1 r-xp 00000000 fe:01 11 /opt/mpi/lib/libmpi.so.12.3.4",
        "7f1-7f2 r-xp 00000000 fe:01 11 /opt/mpi/lib/libmpi.so.12.3.4",
        "7f2-7f3 r-xp 00000000 fe:01 12 /opt/mpi/lib/libmpi_mpifh.so.40",
        "7f3-7f4 r-xp 00000000 fe:01 13 /opt/python/MPI.mpich.so",
        "7f4-7f5 rw-p 00000000 00:00 0 [heap]",
    ]

    assert loaded_mpi_libraries(maps) == ["/opt/mpi/lib/libmpi.so.12.3.4"]


@pytest.mark.parametrize(
    ("library", "yes"),
    [("MPICH 5.0.2", True), ("MPICH 4.0.0", True), ("MPICH 3.4.3", False), ("Open MPI 5.0.8", False)],
)
def test_device_memory_is_summed_by_libraries_that_are_known_to(library: str, yes: bool) -> None:
    assert sums_device_memory(library) is yes
