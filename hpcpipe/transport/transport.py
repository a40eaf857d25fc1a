"""The transport of one rank: makes its channels and the groups of its replicas, keeps them moving, ends them.

It chooses the memory strategy and the tags, and lets stages of the same rank talk without MPI. It knows
nothing of schedules: which messages are sent when, and how deep the rings must be, is the caller's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from hpcpipe.errors import TransportError
from hpcpipe.transport.buffers import AwareMemory, DeviceApi, HostMemory, Memory, StagedMemory
from hpcpipe.transport.channel import MpiSender, Wire
from hpcpipe.transport.cuda import sums_device_memory
from hpcpipe.transport.device import CudaDevice
from hpcpipe.transport.group import StageGroup, join
from hpcpipe.transport.header import MAX_SLOTS
from hpcpipe.transport.local import LocalChannel
from hpcpipe.transport.message import ChannelId, ChannelStats, Kind, Receiver, Sender, place_name
from hpcpipe.transport.receiver import MpiReceiver
from hpcpipe.transport.wait import Waiter
from hpcpipe.transport.world import World

DEFAULT_CHUNK_BYTES = 1 << 30
"""Below the 2 GiB that an MPI 3.1 library can count."""

FIRST_CHANNEL_TAG = 64
"""Lower tags belong to messages outside channels, such as reports."""


class Transport:
    """All channels and groups of one rank. One at a time on a World; every rank makes one and calls `finish`.

    ranks_of_stage: per stage the ranks that hold its replicas, in their order.
    device: where received tensors live.
    cuda_aware: whether MPI may be given device memory; ignored for the CPU.
    chunk_bytes: larger tensors go in several MPI messages and sums of at most this size; the same on all ranks.
    device_api: replaces the CUDA device, in tests.

    line: one line about the path that messages take, for the banner.
    """

    def __init__(
        self,
        world: World,
        waiter: Waiter,
        *,
        ranks_of_stage: Sequence[Sequence[int]],
        device: torch.device,
        cuda_aware: bool,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        device_api: DeviceApi | None = None,
    ) -> None:
        for stage, ranks in enumerate(ranks_of_stage):
            if not ranks or len(set(ranks)) < len(ranks):
                raise TransportError(
                    f"stage {stage} is given to the ranks {list(ranks)}: needs one for each replica"
                )
            for replica, rank in enumerate(ranks):
                if not 0 <= rank < world.size:
                    name = place_name(stage, replica, len(ranks))
                    raise TransportError(f"{name} is given to rank {rank}, but there are {world.size} ranks")
        if chunk_bytes < 1:
            raise TransportError(f"messages cannot be sent in pieces of {chunk_bytes} bytes")
        self._world = world
        self._waiter = waiter
        self._ranks_of_stage = [tuple(ranks) for ranks in ranks_of_stage]
        self._chunk_bytes = chunk_bytes
        self._memory, self._sums = _memories(world.library, device, cuda_aware, device_api)
        self._groups: dict[int, StageGroup] = {}
        self._senders: dict[ChannelId, MpiSender] = {}
        self._receivers: dict[ChannelId, MpiReceiver] = {}
        self._local: dict[ChannelId, LocalChannel] = {}
        replicated = any(len(ranks) > 1 for ranks in self._ranks_of_stage)
        sums = f" (sums: {self._sums.line})" if replicated and self._sums is not self._memory else ""
        self.line = f"{self._memory.line}{sums} over {world.library}, {world.size} ranks"
        waiter.idle.append(self.progress)

    def sender(self, channel: ChannelId, *, depth: int, full_rows: int | None) -> Sender:
        """The sending end of a channel; its source must be on this rank.

        depth: ring positions, the same at both ends: the most messages between send and release.
        full_rows: samples in a full message, or None when the first message is a full one.
        """
        channel = self._named(channel)
        self._check(channel, self._senders, self._source_rank(channel), channel.source_name, depth)
        if self._same_rank(channel):
            local = self._local_channel(channel, depth)
            local.full_rows = full_rows
            return local
        sender = MpiSender(
            channel,
            self._wire(channel, self._destination_rank(channel), depth),
            self._memory,
            depth=depth,
            full_rows=full_rows,
        )
        self._senders[channel] = sender
        return sender

    def receiver(self, channel: ChannelId, *, depth: int) -> Receiver:
        """The receiving end of a channel, its receives posted; its destination must be on this rank."""
        channel = self._named(channel)
        self._check(channel, self._receivers, self._destination_rank(channel), channel.destination_name, depth)
        if self._same_rank(channel):
            return self._local_channel(channel, depth)
        receiver = MpiReceiver(
            channel,
            self._wire(channel, self._source_rank(channel), depth),
            self._memory,
            self._waiter,
            depth=depth,
            being_sent=self._being_sent,
            takers=self._takers,
        )
        self._receivers[channel] = receiver
        return receiver

    def group(self, stage: int) -> StageGroup:
        """The replicas of a stage of this rank, for what they do together; the same object at every call.

        All of them call it for the first time together: it waits for them.

        Raises TransportError for a stage that has one replica or is not on this rank, and naming the ranks that
        do not come.
        """
        if stage not in self._groups:
            ranks = self._ranks_of_stage[stage]
            if len(ranks) == 1 or self._world.rank not in ranks:
                raise TransportError(
                    f"rank {self._world.rank} is not one of several replicas of stage {stage}, which is on the "
                    f"ranks {list(ranks)}"
                )
            members = join(self._world, self._waiter, ranks, stage)
            self._groups[stage] = StageGroup(
                members, self._waiter, self._sums, stage=stage, ranks=ranks, limit=self._chunk_bytes
            )
        return self._groups[stage]

    def progress(self) -> None:
        """Let MPI move what is on its way; costs a microsecond per channel and never waits."""
        for sender in self._senders.values():
            sender.progress()
        for receiver in self._receivers.values():
            receiver.progress()
        for group in self._groups.values():
            group.progress()

    def finish(self, *, discard: bool = False) -> None:
        """End every channel and group together with all other ranks; nothing is outstanding afterwards.

        discard: drop messages that nobody has asked for, as after a stop in the middle of the schedule.

        Raises TransportError when such messages are left and `discard` is not set, and always, before anything
        has ended, when an all-reduce is left in the middle: MPI cannot take back what has started.
        """
        for group in self._groups.values():
            group.check_settled()
        for sender in self._senders.values():
            sender.end()
        ends: dict[ChannelId, MpiReceiver | LocalChannel] = {**self._receivers, **self._local}
        left = {channel: unread for channel, end in ends.items() if (unread := end.drain())}
        self._waiter.wait(
            [flight for sender in self._senders.values() for flight in sender.flights],
            "its last messages to be taken",
            kind="finish",
            peers=self._takers,
        )
        for sender in self._senders.values():
            sender.progress()
        for receiver in self._receivers.values():
            receiver.close()
        self._receivers.clear()
        self._waiter.idle.remove(self.progress)
        # A neighbour that went on at once could send into receives that are still being taken back here.
        self._world.barrier("the end of all channels")
        for group in self._groups.values():
            group.close()
        self._groups.clear()
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

    def _named(self, channel: ChannelId) -> ChannelId:
        """The same channel with what its names need. Raises TransportError for a replica that does not exist."""
        counts = []
        for stage, replica in (
            (channel.source, channel.source_replica),
            (channel.destination, channel.destination_replica),
        ):
            replicas = len(self._ranks_of_stage[stage])
            if not 0 <= replica < replicas:
                raise TransportError(
                    f"the {channel}: stage {stage} has {replicas} replicas, none is number {replica}"
                )
            counts.append(replicas)
        return replace(channel, source_replicas=counts[0], destination_replicas=counts[1])

    def _check(
        self, channel: ChannelId, known: Mapping[ChannelId, object], owner: int, name: str, depth: int
    ) -> None:
        if channel in known:
            raise TransportError(f"the {channel} already have this end")
        if depth < 1:
            raise TransportError(f"the {channel} need a ring of at least 1, not {depth}")
        if owner != self._world.rank:
            raise TransportError(f"the {channel}: {name} is on rank {owner}, not on {self._world.rank}")

    def _source_rank(self, channel: ChannelId) -> int:
        return self._ranks_of_stage[channel.source][channel.source_replica]

    def _destination_rank(self, channel: ChannelId) -> int:
        return self._ranks_of_stage[channel.destination][channel.destination_replica]

    def _same_rank(self, channel: ChannelId) -> bool:
        return self._source_rank(channel) == self._destination_rank(channel)

    def _places(self, rank: int) -> list[tuple[int, int]]:
        """What a rank holds, as (stage, replica)."""
        return [
            (stage, replica)
            for stage, ranks in enumerate(self._ranks_of_stage)
            for replica, owner in enumerate(ranks)
            if owner == rank
        ]

    def _local_channel(self, channel: ChannelId, depth: int) -> LocalChannel:
        if channel not in self._local:
            self._local[channel] = LocalChannel(channel, depth=depth)
        return self._local[channel]

    def _wire(self, channel: ChannelId, peer: int, depth: int) -> Wire:
        """Tags of a channel: apart from those of every other channel between the same two ranks."""
        sources = self._places(self._source_rank(channel))
        destinations = self._places(self._destination_rank(channel))
        source = sources.index((channel.source, channel.source_replica))
        destination = destinations.index((channel.destination, channel.destination_replica))
        pairs, pair = len(sources) * len(destinations), source * len(destinations) + destination
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

    def _takers(self) -> list[int]:
        """The ranks that have not taken all that was sent to them."""
        return sorted({sender.peer for sender in self._senders.values() if sender.flights})

    def _being_sent(self, address: int, nbytes: int) -> bool:
        for sender in self._senders.values():
            for flight in sender.flights:
                for sent in flight.departure.addresses:
                    if address <= sent < address + nbytes:
                        return True
        return False


def _memories(
    library: str, device: torch.device, cuda_aware: bool, api: DeviceApi | None
) -> tuple[Memory, Memory]:
    """How MPI reaches the tensors of messages, and those that it sums; usually the same."""
    if api is None:
        if device.type == "cpu":
            host = HostMemory()
            return host, host
        if device.type != "cuda":
            raise TransportError(f"tensors on {device} cannot be sent: the transport knows cpu and cuda")
        api = CudaDevice(device)
    staged = StagedMemory(api)
    if not cuda_aware:
        return staged, staged
    aware = AwareMemory(api)
    return aware, aware if sums_device_memory(library) else staged
