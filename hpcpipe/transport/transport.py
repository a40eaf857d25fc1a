"""The transport of one rank: makes the channels between its stages and others, keeps them moving, ends them.

It chooses the memory strategy and the tags, and lets stages of the same rank talk without MPI. It knows
nothing of schedules: which messages are sent when, and how deep the rings must be, is the caller's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hpcpipe.errors import TransportError
from hpcpipe.transport.buffers import AwareMemory, DeviceApi, HostMemory, Memory, StagedMemory
from hpcpipe.transport.channel import MpiSender, Wire
from hpcpipe.transport.device import CudaDevice
from hpcpipe.transport.header import MAX_SLOTS
from hpcpipe.transport.local import LocalChannel
from hpcpipe.transport.message import ChannelId, ChannelStats, Kind, Receiver, Sender
from hpcpipe.transport.receiver import MpiReceiver
from hpcpipe.transport.wait import Waiter
from hpcpipe.transport.world import World

DEFAULT_CHUNK_BYTES = 1 << 30
"""Below the 2 GiB that an MPI 3.1 library can count."""

FIRST_CHANNEL_TAG = 64
"""Lower tags belong to messages outside channels, such as reports."""


class Transport:
    """All channels of one rank. One at a time on a World; every rank makes one and calls `finish`.

    rank_of_stage: the rank that owns each stage.
    device: where received tensors live.
    cuda_aware: whether MPI may be given device memory; ignored for the CPU.
    chunk_bytes: larger tensors go in several MPI messages of at most this size.
    device_api: replaces the CUDA device, in tests.

    line: one line about the path that messages take, for the banner.
    """

    def __init__(
        self,
        world: World,
        waiter: Waiter,
        *,
        rank_of_stage: Sequence[int],
        device: torch.device,
        cuda_aware: bool,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        device_api: DeviceApi | None = None,
    ) -> None:
        for stage, rank in enumerate(rank_of_stage):
            if not 0 <= rank < world.size:
                raise TransportError(f"stage {stage} is given to rank {rank}, but there are {world.size} ranks")
        if chunk_bytes < 1:
            raise TransportError(f"messages cannot be sent in pieces of {chunk_bytes} bytes")
        self._world = world
        self._waiter = waiter
        self._rank_of_stage = list(rank_of_stage)
        self._chunk_bytes = chunk_bytes
        self._memory = _memory(device, cuda_aware, device_api)
        self._senders: dict[ChannelId, MpiSender] = {}
        self._receivers: dict[ChannelId, MpiReceiver] = {}
        self._local: dict[ChannelId, LocalChannel] = {}
        self.line = f"{self._memory.line} over {world.library}, {world.size} ranks"
        waiter.idle.append(self.progress)

    def sender(self, channel: ChannelId, *, depth: int, full_rows: int | None) -> Sender:
        """The sending end of a channel; its first stage must be this rank's.

        depth: ring positions, the same at both ends: the most messages between send and release.
        full_rows: samples in a full message, or None when the first message is a full one.
        """
        self._check(channel, self._senders, channel.source, depth)
        if self._same_rank(channel):
            local = self._local_channel(channel, depth)
            local.full_rows = full_rows
            return local
        sender = MpiSender(
            channel,
            self._wire(channel, self._rank_of_stage[channel.destination], depth),
            self._memory,
            depth=depth,
            full_rows=full_rows,
        )
        self._senders[channel] = sender
        return sender

    def receiver(self, channel: ChannelId, *, depth: int) -> Receiver:
        """The receiving end of a channel, its receives posted; its last stage must be this rank's."""
        self._check(channel, self._receivers, channel.destination, depth)
        if self._same_rank(channel):
            return self._local_channel(channel, depth)
        receiver = MpiReceiver(
            channel,
            self._wire(channel, self._rank_of_stage[channel.source], depth),
            self._memory,
            self._waiter,
            depth=depth,
            being_sent=self._being_sent,
        )
        self._receivers[channel] = receiver
        return receiver

    def progress(self) -> None:
        """Let MPI move what is on its way; costs a microsecond per channel and never waits."""
        for sender in self._senders.values():
            sender.progress()
        for receiver in self._receivers.values():
            receiver.progress()

    def finish(self, *, discard: bool = False) -> None:
        """End every channel together with all other ranks; nothing is outstanding afterwards.

        discard: drop messages that nobody has asked for, as after a stop in the middle of the schedule.

        Raises TransportError when such messages are left and `discard` is not set.
        """
        for sender in self._senders.values():
            sender.end()
        ends: dict[ChannelId, MpiReceiver | LocalChannel] = {**self._receivers, **self._local}
        left = {channel: unread for channel, end in ends.items() if (unread := end.drain())}
        self._waiter.wait(
            [flight for sender in self._senders.values() for flight in sender.flights],
            "its last messages to be taken",
            kind="finish",
        )
        for sender in self._senders.values():
            sender.progress()
        for receiver in self._receivers.values():
            receiver.close()
        self._receivers.clear()
        self._waiter.idle.remove(self.progress)
        # A neighbour that went on at once could send into receives that are still being taken back here.
        self._world.barrier("the end of all channels")
        if self.outstanding:
            raise TransportError(f"{self.outstanding} sends are outstanding after the end of all channels")
        if left and not discard:
            channel, unread = next(iter(left.items()))
            raise TransportError(f"nobody received the {channel} of minibatches {', '.join(map(str, unread))}")

    @property
    def outstanding(self) -> int:
        """Messages whose sends are not done."""
        count = 0
        for sender in self._senders.values():
            count += len(sender.flights)
        return count

    @property
    def sent(self) -> dict[ChannelId, ChannelStats]:
        """What each sending end to another rank has sent."""
        return {channel: sender.stats for channel, sender in self._senders.items()}

    @property
    def received(self) -> dict[ChannelId, ChannelStats]:
        """What each receiving end from another rank has received."""
        return {channel: receiver.stats for channel, receiver in self._receivers.items()}

    def _check(self, channel: ChannelId, known: Mapping[ChannelId, object], stage: int, depth: int) -> None:
        if channel in known:
            raise TransportError(f"the {channel} already have this end")
        if depth < 1:
            raise TransportError(f"the {channel} need a ring of at least 1, not {depth}")
        if self._rank_of_stage[stage] != self._world.rank:
            owner = self._rank_of_stage[stage]
            raise TransportError(f"the {channel}: stage {stage} is on rank {owner}, not on {self._world.rank}")

    def _same_rank(self, channel: ChannelId) -> bool:
        return self._rank_of_stage[channel.source] == self._rank_of_stage[channel.destination]

    def _local_channel(self, channel: ChannelId, depth: int) -> LocalChannel:
        if channel not in self._local:
            self._local[channel] = LocalChannel(channel, depth=depth)
        return self._local[channel]

    def _wire(self, channel: ChannelId, peer: int, depth: int) -> Wire:
        """Tags of a channel: apart from those of every other channel between the same two ranks."""
        stages = self._rank_of_stage
        sources = [stage for stage, rank in enumerate(stages) if rank == stages[channel.source]]
        destinations = [stage for stage, rank in enumerate(stages) if rank == stages[channel.destination]]
        pairs = len(sources) * len(destinations)
        pair = sources.index(channel.source) * len(destinations) + destinations.index(channel.destination)
        channels, index = pairs * len(Kind), pair * len(Kind) + channel.kind
        parts = MAX_SLOTS + 1
        tags = tuple(FIRST_CHANNEL_TAG + (position * channels + index) * parts for position in range(depth))
        if tags[-1] + parts > self._world.tag_limit:
            raise TransportError(
                f"the {channel} with a ring of {depth} need tags up to {tags[-1] + parts}, but "
                f"{self._world.library} allows {self._world.tag_limit}: have fewer stages per rank or fewer "
                "minibatches in flight"
            )
        return Wire(port=self._world, peer=peer, tags=tags, chunk_bytes=self._chunk_bytes)

    def _being_sent(self, address: int, nbytes: int) -> bool:
        for sender in self._senders.values():
            for flight in sender.flights:
                for sent in flight.departure.addresses:
                    if address <= sent < address + nbytes:
                        return True
        return False


def _memory(device: torch.device, cuda_aware: bool, api: DeviceApi | None) -> Memory:
    if api is None:
        if device.type == "cpu":
            return HostMemory()
        if device.type != "cuda":
            raise TransportError(f"tensors on {device} cannot be sent: the transport knows cpu and cuda")
        api = CudaDevice(device)
    return AwareMemory(api) if cuda_aware else StagedMemory(api)
