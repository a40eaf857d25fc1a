"""The transport on a real GPU: streams, events, pinned memory, and CuPy rings where MPI can use them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.mpi.fake_adder import FakeAdder
from tests.mpi.launch import Result, run
from tests.mpi.programs import group_cases, transport_cases

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU on this machine", allow_module_level=True)


def _can_send_device_memory() -> bool:
    shown = subprocess.run(
        [sys.executable, "-m", "hpcpipe.cli.main", "doctor", "--json"], capture_output=True, text=True, check=False
    )
    return bool(json.loads(shown.stdout)["mpi"].get("device_exchange") == "works")


def _done(result: Result) -> set[str]:
    return {line.split()[1] for line in result.stdout.splitlines() if line.endswith(" ok")}


def test_two_ranks_on_one_card_exchange_through_pinned_memory() -> None:
    result = run("transport_cases.py", 2, "cuda", timeout_s=120)

    assert result.rc == 0, str(result)
    assert set(transport_cases.CASES.names(["cuda"])) <= {
        line.split()[1] for line in result.stdout.splitlines() if line.endswith(" ok")
    }


def test_two_ranks_on_one_card_exchange_device_memory() -> None:
    pytest.importorskip("cupy")
    if not _can_send_device_memory():
        pytest.skip("this MPI library cannot send device memory")

    result = run("transport_cases.py", 2, "cuda-aware", timeout_s=120)

    assert result.rc == 0, str(result)


def test_two_replicas_on_one_card_sum_through_pinned_memory() -> None:
    result = run("group_cases.py", 2, "cuda", timeout_s=120)

    assert result.rc == 0, str(result)
    assert set(group_cases.CASES.names(["cuda"])) <= _done(result)


def test_two_replicas_on_one_card_sum_device_memory() -> None:
    pytest.importorskip("cupy")
    if not _can_send_device_memory():
        pytest.skip("this MPI library cannot send device memory")

    result = run("group_cases.py", 2, "cuda-aware", timeout_s=120)

    assert result.rc == 0, str(result)


def test_a_bucket_that_a_gradient_hook_makes_ready_is_summed_behind_its_kernels() -> None:
    from hpcpipe.transport.buffers import StagedMemory
    from hpcpipe.transport.device import CudaDevice
    from hpcpipe.transport.reduce import BucketReduce
    from hpcpipe.transport.wait import Waiter

    device = torch.device("cuda", 0)
    flat = torch.zeros(1 << 20, device=device)
    in_place = StagedMemory(CudaDevice(device)).in_place(flat)
    reducer = BucketReduce(FakeAdder(), in_place, Waiter(rank=0), flat, [(0, flat.numel())], limit=1 << 18)
    leaf = torch.ones(flat.numel(), device=device, requires_grad=True)

    def hook(parameter: torch.Tensor) -> None:
        torch.cuda._sleep(100_000_000)
        flat.copy_(parameter.grad)
        reducer.ready(0)

    leaf.register_post_accumulate_grad_hook(hook)
    reducer.begin()
    (leaf * 3).sum().backward()
    reducer.finish("the all-reduce")

    assert bool((flat == 6.0).all())


def test_a_send_waits_for_the_kernels_that_fill_its_tensor() -> None:
    from hpcpipe.transport.buffers import StagedMemory
    from hpcpipe.transport.device import CudaDevice

    device = torch.device("cuda", 0)
    memory = StagedMemory(CudaDevice(device))
    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        tensor = torch.zeros(1 << 20, device=device)
        torch.cuda._sleep(200_000_000)
        tensor.fill_(7.0)
        departure = memory.depart([tensor])

    assert bool((departure.held[0].tensor.view(torch.float32) == 7.0).all())


def test_memory_for_mpi_comes_from_cupy_and_is_seen_by_torch() -> None:
    cupy = pytest.importorskip("cupy")
    from hpcpipe.transport.device import CudaDevice

    block = CudaDevice(torch.device("cuda", 0)).allocate(256)
    block.tensor.fill_(9)
    torch.cuda.synchronize()

    pointer = block.__cuda_array_interface__["data"][0]
    assert pointer == block.tensor.data_ptr()
    assert cupy.asarray(block).sum() == 9 * 256


def test_link_is_measured_on_the_card() -> None:
    result = run(["-m", "hpcpipe.cli.main", "bench", "link", "--json", "--device", "cuda"], 2, timeout_s=120)

    assert result.rc == 0, str(result)
    assert json.loads(result.stdout)["device"].startswith("cuda")
