"""Whether the MPI library may be given device memory, and how that was found out.

A wrong yes is a segmentation fault and a wrong no costs copies through host memory, so that no library is believed
without evidence. Queries are known to say yes where the transport below cannot: `hpcpipe doctor` tries it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcpipe.errors import ConfigError

SETTINGS = ("auto", "on", "off")

# Switches of libraries that have no query, or whose query does not know about them.
_SWITCHES = ("MPICH_GPU_SUPPORT_ENABLED", "MPIR_CVAR_ENABLE_GPU", "MV2_USE_CUDA", "MVP_USE_CUDA", "PSP_CUDA")
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_RISKY_ALLOCATORS = ("expandable_segments:true", "backend:cudamallocasync")
_GPU_SUPPORT_CUDA = 0


@dataclass(frozen=True, kw_only=True)
class Awareness:
    """The answer, where it comes from, and what the user should know; `how` and `warnings` are plain lines."""

    enabled: bool
    how: str
    warnings: tuple[str, ...] = ()


def detect(
    setting: str,
    library: str,
    *,
    memory_kinds: str | None = None,
    environment: Mapping[str, str] = os.environ,
    query: Callable[[], tuple[str, bool] | None] | None = None,
    has_cupy: bool | None = None,
) -> Awareness:
    """Decide whether MPI may be given device memory; for its queries to count, MPI must be initialised here.

    setting: `auto`, `on` or `off`, from the run file.
    library: name and version of the MPI library.
    memory_kinds: what the library lists under `mpi_memory_alloc_kinds`.
    query, has_cupy: replace the look into the loaded library and at the installed packages.

    Raises ConfigError for another setting, or for `on` without CuPy.
    """
    if setting not in SETTINGS:
        raise ConfigError(f"cuda_aware = {setting!r}: must be one of {', '.join(SETTINGS)}")
    warnings = tuple(allocator_warnings(environment))
    if setting == "off":
        return Awareness(enabled=False, how="switched off by cuda_aware = 'off'")
    if has_cupy is None:
        has_cupy = importlib.util.find_spec("cupy") is not None
    if setting == "on":
        if not has_cupy:
            raise ConfigError(
                "cuda_aware = 'on' needs CuPy for its buffers: pip install hpcpipe[cuda13] or [cuda12]"
            )
        return Awareness(enabled=True, how="switched on by cuda_aware = 'on', not checked", warnings=warnings)
    enabled, how = _evidence(library, memory_kinds, environment, query or query_loaded_library)
    if enabled and not has_cupy:
        return Awareness(
            enabled=False, how=f"{how}, but CuPy is missing (pip install hpcpipe[cuda13] or [cuda12])"
        )
    return Awareness(enabled=enabled, how=how, warnings=warnings if enabled else ())


def sums_device_memory(library: str) -> bool:
    """Whether a library that may be given device memory may be given it for nonblocking sums, too.

    Only MPICH 4 and later are known to copy it to the host and back by themselves. Open MPI, although its messages
    and blocking reductions know device memory, adds up on the host whatever the pointer is, and crashes (its
    issues 9845 and 12045).

    library: name and version of the MPI library.
    """
    found = re.match(r"MPICH (\d+)", library)
    return found is not None and int(found[1]) >= 4


def allocator_warnings(environment: Mapping[str, str]) -> list[str]:
    """One line for each setting of torch's allocator whose memory loses CUDA IPC between ranks."""
    found = []
    for variable in _ALLOCATOR_VARIABLES:
        value = environment.get(variable, "")
        if any(risky in value.lower() for risky in _RISKY_ALLOCATORS):
            found.append(
                f"{variable}={value}: memory of this allocator cannot be shared between ranks by CUDA IPC; "
                "hpcpipe's own message buffers are plain cudaMalloc memory, but others that give tensors to MPI "
                "may be slow or fail"
            )
    return found


def query_loaded_library() -> tuple[str, bool] | None:
    """Ask the MPI library in this process, as (name of the query, answer); None when it has no query."""
    for path in loaded_mpi_libraries(_memory_map()):
        library = ctypes.CDLL(path)
        if hasattr(library, "MPIX_GPU_query_support"):
            flag = ctypes.c_int(0)
            if library.MPIX_GPU_query_support(ctypes.c_int(_GPU_SUPPORT_CUDA), ctypes.byref(flag)) == 0:
                return "MPIX_GPU_query_support", bool(flag.value)
        if hasattr(library, "MPIX_Query_cuda_support"):
            return "MPIX_Query_cuda_support", bool(library.MPIX_Query_cuda_support())
    return None


def loaded_mpi_libraries(memory_map: Iterable[str]) -> list[str]:
    """Paths of the MPI libraries among the lines of a /proc/PID/maps."""
    paths = {line.split()[-1] for line in memory_map if "/" in line}
    return sorted(path for path in paths if re.fullmatch(r"libmpi(ch|_cray|_abi)?\.so[.0-9]*", Path(path).name))


def _memory_map() -> list[str]:
    try:
        return Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []


def _evidence(
    library: str,
    memory_kinds: str | None,
    environment: Mapping[str, str],
    query: Callable[[], tuple[str, bool] | None],
) -> tuple[bool, str]:
    for switch in _SWITCHES:
        value = environment.get(switch)
        if value == "0":
            return False, f"{switch}=0"
    answer = query()
    if answer is not None:
        name, yes = answer
        return yes, f"{name} of {library} says {'yes' if yes else 'no'}"
    if memory_kinds is not None:
        yes = any(kind.split(":")[0] == "cuda" for kind in memory_kinds.split(","))
        return yes, f"{library} lists the memory kinds {memory_kinds}"
    for switch in _SWITCHES:
        value = environment.get(switch)
        if value:
            return True, f"{switch}={value}"
    return False, f"{library} does not say, so device memory is not given to it (cuda_aware = 'on' overrules this)"
