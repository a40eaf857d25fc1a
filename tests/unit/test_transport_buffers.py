from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hpcpipe.errors import TransportError
from hpcpipe.transport.buffers import ALIGNMENT, AwareMemory, HostMemory, Memory, StagedMemory
from hpcpipe.transport.header import slot_layout
from tests.mpi.fake_device import FakeDevice

device_memories = pytest.mark.parametrize("strategy", [AwareMemory, StagedMemory], ids=["aware", "staged"])


def _bytes_at(address: int, count: int) -> bytes:
    import ctypes

    return ctypes.string_at(address, count)


def test_the_host_path_sends_a_contiguous_tensor_from_its_own_memory() -> None:
    tensor = torch.arange(12.0).view(3, 4)

    departure = HostMemory().depart([tensor])

    assert departure.addresses == [tensor.data_ptr()]


def test_the_host_path_keeps_a_tensor_until_it_has_been_sent() -> None:
    memory = HostMemory()
    departure = memory.depart([torch.ones(4)])

    assert len(departure.held) == 1
    memory.departed(departure)

    assert departure.held == []


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(16.0).view(4, 4).T,
        torch.arange(24.0).view(4, 6)[:, ::2],
        torch.arange(3.0).view(3, 1).expand(3, 5),
        torch.arange(48.0).view(1, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    ],
    ids=["transposed", "strided", "expanded", "channels_last", "lazy conjugate", "lazy negative"],
)
@pytest.mark.parametrize("kind", ["host", "aware", "staged"])
def test_what_lies_in_no_single_piece_departs_as_the_values_that_it_shows(tensor: torch.Tensor, kind: str) -> None:
    memory: Memory = {
        "host": HostMemory,
        "aware": lambda: AwareMemory(FakeDevice()),
        "staged": lambda: StagedMemory(FakeDevice()),
    }[kind]()

    departure = memory.depart([tensor])

    sent = _bytes_at(departure.addresses[0], tensor.numel() * tensor.element_size())
    assert sent == tensor.resolve_conj().resolve_neg().contiguous().numpy().tobytes()


def test_landings_are_aligned_and_received_tensors_are_views_of_them() -> None:
    landing = HostMemory().landing(48)

    tensor = landing.tensor(slot_layout(torch.float64, (2, 3), False))

    assert landing.address % ALIGNMENT == 0
    assert tensor.data_ptr() == landing.address
    assert tensor.shape == (2, 3)


def test_each_message_gets_a_tensor_of_its_own_over_the_same_memory() -> None:
    landing = HostMemory().landing(16)
    first = landing.tensor(slot_layout(torch.float32, (4,), False)).requires_grad_()
    first.sum().backward()

    second = landing.tensor(slot_layout(torch.float32, (4,), False))

    assert second.data_ptr() == first.data_ptr()
    assert not second.requires_grad
    assert second.grad is None


def test_a_landing_made_in_inference_mode_serves_training_later() -> None:
    with torch.inference_mode():
        landing = HostMemory().landing(16)

    assert not landing.tensor(slot_layout(torch.float32, (4,), False)).is_inference()


def test_a_tensor_on_another_device_is_refused_by_the_host_path() -> None:
    with pytest.raises(TransportError, match="tensor on meta given to a transport for the CPU"):
        HostMemory().depart([torch.empty(3, device="meta")])


@device_memories
def test_a_device_send_waits_for_an_event_behind_the_copies(strategy: Callable[[FakeDevice], Memory]) -> None:
    device = FakeDevice()
    source = torch.zeros(4)
    device.queue(lambda: source.fill_(7.0))

    departure = strategy(device).depart([source, source])

    assert device.log == ["copy", "copy", "record", "synchronize"]
    assert _bytes_at(departure.addresses[0], 16) == torch.full((4,), 7.0).numpy().tobytes()


@device_memories
def test_a_buffer_of_a_send_is_used_again_only_after_the_send(strategy: Callable[[FakeDevice], Memory]) -> None:
    memory = strategy(FakeDevice())
    first = memory.depart([torch.ones(4)])
    second = memory.depart([torch.ones(4)])
    addresses = {first.addresses[0], second.addresses[0]}
    memory.departed(first)

    third = memory.depart([torch.ones(4)])

    assert len(addresses) == 2
    assert third.addresses[0] in addresses
    assert third.addresses[0] != second.addresses[0]


@device_memories
def test_a_device_send_of_a_tensor_with_gradient_records_no_graph(
    strategy: Callable[[FakeDevice], Memory],
) -> None:
    device = FakeDevice()
    departure = strategy(device).depart([torch.ones(4, requires_grad=True) * 2])

    assert not departure.held[0].tensor.requires_grad


def test_a_staged_tensor_is_complete_when_its_stream_gets_there() -> None:
    device = FakeDevice()
    landing = StagedMemory(device).landing(16)
    torch.frombuffer(_writable(landing.address, 16), dtype=torch.float32).fill_(3.0)

    tensor = landing.tensor(slot_layout(torch.float32, (4,), False))
    seen: list[list[float]] = []
    device.queue(lambda: seen.append(tensor.tolist()))
    device.synchronize()

    assert seen == [[3.0] * 4]


@device_memories
def test_a_fence_passes_when_the_work_before_it_has_run(strategy: Callable[[FakeDevice], Memory]) -> None:
    device = FakeDevice()
    device.queue(lambda: None)

    fence = strategy(device).fence()

    assert fence is not None
    assert [fence.query(), fence.query()] == [False, True]


def _writable(address: int, count: int) -> object:
    import ctypes

    return (ctypes.c_char * count).from_address(address)
