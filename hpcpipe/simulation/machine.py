"""Executes the action lists of all ranks in simulated time: the discrete-event loop.

Ranks stand in a heap by their own time; the one furthest behind goes on until it waits for something. A send takes
no time of its rank: the transfer starts when its ports are free. Ranks ask for shared ports in the order of time,
since whoever is ahead of the others lets them go first. The loop knows actions, never an order of them: no
schedule is named here. What is kept grows with what is in flight, not with the length of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from hpcpipe.schedule import Action, Op, Place, Schedule, rank_actions
from hpcpipe.schedule.dryrun import ScheduleError
from hpcpipe.simulation.collective import Meeting, Reduction
from hpcpipe.simulation.costs import StageCosts
from hpcpipe.simulation.events import Event, Recorder, Transfer
from hpcpipe.simulation.network import Network
from hpcpipe.simulation.state import Lane, Rank, Route, foreseen

# An attribute of an Enum takes longer than the rest of what is done for an action.
FORWARD, BACKWARD, UPDATE, PREDICT, EVALUATE = Op.FORWARD, Op.BACKWARD, Op.UPDATE, Op.PREDICT, Op.EVALUATE
SEND_ACTIVATION, SEND_GRADIENT, SEND_EVALUATION = Op.SEND_ACTIVATION, Op.SEND_GRADIENT, Op.SEND_EVALUATION
RECEIVE_ACTIVATION, RECEIVE_GRADIENT = Op.RECEIVE_ACTIVATION, Op.RECEIVE_GRADIENT
RECEIVE_EVALUATION = Op.RECEIVE_EVALUATION


class Machine:
    """All ranks, their messages and all-reduces, from the first action to the last.

    `marks` are two weight versions: each rank keeps its time at the updates that make them.
    """

    def __init__(
        self,
        schedule: Schedule,
        costs: Sequence[StageCosts],
        network: Network,
        ranks_of_stage: Sequence[Sequence[int]],
        *,
        marks: tuple[int, int],
        recorder: Recorder,
        bucket_bytes: int,
        allreduce: str,
    ) -> None:
        self.network = network
        self.recorder = recorder
        self.routes: list[Route] = []
        self.lanes = [
            [Lane(stage, replica, cost) for replica in range(len(ranks))]
            for stage, (cost, ranks) in enumerate(zip(costs, ranks_of_stage, strict=True))
        ]
        self.ranks = _ranks(self.lanes, ranks_of_stage)
        self.reductions: dict[int, Reduction] = {}
        self._marks = marks
        self._record_from, self._record_until = recorder.window
        self._width = max(schedule.microbatches, schedule.evaluation_batches, 1)
        # Entry r below the number of ranks is rank r, entry ranks + s the all-reduce of stage s.
        self._heap = [(0.0, index) for index in range(len(self.ranks))]
        for lanes in self.lanes:
            if len(lanes) > 1:
                self._join(lanes, bucket_bytes, allreduce)
        for rank in self.ranks:
            rank.actions = rank_actions(
                schedule, [Place(lane.stage, lane.replica) for lane in rank.lanes.values()]
            )
            for lane in rank.lanes.values():
                if lane.reduction is not None:
                    rank.actions = foreseen(rank.actions, lane)

    def run(self) -> float:
        """Run to the end; the time at which the last rank is done. Raises ScheduleError for a deadlock."""
        heap, ranks = self._heap, self.ranks
        while heap:
            now, entry = heappop(heap)
            if entry < len(ranks):
                self._advance(ranks[entry])
            else:
                self._reduce(entry - len(ranks), now)
        for rank in ranks:
            if rank.blocked is not None:
                raise ScheduleError("deadlock: what it waits for never comes", action=rank.blocked)
        return max(rank.now for rank in ranks)

    def _advance(self, rank: Rank) -> None:
        """Let a rank go on until it waits, must let others go first, or is done."""
        heap, lanes, width = self._heap, rank.lanes, self._width
        marks = self._marks
        record_from, record_until = self._record_from, self._record_until
        records = record_from < record_until
        now, busy, held, peak = rank.now, rank.busy, rank.held, rank.peak
        if rank.pending is not None:
            (action, route), rank.pending = rank.pending, None
            self._transfer(route, action, now)
            if record_from <= action.minibatch < record_until:
                self.recorder.events.append(Event(rank.index, action, now, now, held))
        for action in rank.actions:
            op = action.op
            lane = lanes[action.stage]
            began = now
            if op is FORWARD:
                now += lane.forward_s
                busy += lane.forward_s
                held += lane.saved_bytes
                if held > peak:
                    peak = held
            elif op is BACKWARD:
                if lane.closing:
                    self._announce(lane, action, now, idle=False)
                now += lane.backward_s
                busy += lane.backward_s
                held -= lane.saved_bytes
            elif op is RECEIVE_ACTIVATION or op is RECEIVE_GRADIENT or op is RECEIVE_EVALUATION:
                if op is RECEIVE_ACTIVATION:
                    inbox = lane.activations
                elif op is RECEIVE_GRADIENT:
                    inbox = lane.gradients
                else:
                    inbox = lane.evaluations
                number = action.minibatch * width + action.microbatch
                arrival = inbox.pop(number, None)
                if arrival is None:
                    rank.waits_in, rank.waits_for, rank.blocked = inbox, number, action
                    break
                if arrival > now:
                    now = arrival
            elif op is SEND_ACTIVATION or op is SEND_GRADIENT or op is SEND_EVALUATION:
                if op is SEND_ACTIVATION:
                    routes = lane.to_activations
                elif op is SEND_GRADIENT:
                    routes = lane.to_gradients
                else:
                    routes = lane.to_evaluations
                route = routes.get(action.peer_replica) or self._route(lane, action)
                if route.shared and heap and heap[0][0] < now:
                    rank.pending = action, route
                    heappush(heap, (now, rank.index))
                    break
                self._transfer(route, action, now)
            elif op is UPDATE:
                now += lane.update_s
                busy += lane.update_s
                held += lane.version_bytes * (1 - len(action.releases))
                if held > peak:
                    peak = held
                version = action.version
                if version in marks:
                    rank.marks[version] = now, busy
            elif op is PREDICT:
                now += lane.update_s
                busy += lane.update_s
            elif op is EVALUATE:
                now += lane.forward_s
                busy += lane.forward_s
            else:
                rank.now = now
                ends = self._together(lane, action)
                if ends is None:
                    rank.blocked = action
                    break
                now = ends
            if records and record_from <= action.minibatch < record_until:
                self.recorder.events.append(Event(rank.index, action, began, now, held))
        rank.now, rank.busy, rank.held, rank.peak = now, busy, held, peak

    # -- messages ------------------------------------------------------------------------------------------

    def _transfer(self, route: Route, action: Action, now: float) -> None:
        """Occupy the ports of a message that is ready `now`, and wake who waits for it."""
        egress, ingress, seconds = route.egress, route.ingress, route.seconds
        start = egress.free
        if start < now:
            start = now
        if ingress is not None:
            if ingress.free > start:
                start = ingress.free
            ingress.free = start + seconds
            ingress.busy += seconds
        ends = start + seconds
        egress.free = ends
        egress.busy += seconds
        route.messages += 1
        number = action.minibatch * self._width + action.microbatch
        receiver = route.to
        if receiver.waits_for == number and receiver.waits_in is route.inbox:
            receiver.waits_in = None
            self._wake(receiver, ends + route.latency_s)
        else:
            route.inbox[number] = ends + route.latency_s
        if self._record_from <= action.minibatch < self._record_until:
            self.recorder.transfers.append(Transfer(egress.name, action, start, ends))

    def _wake(self, rank: Rank, when: float) -> None:
        """What the rank was blocked on is there at `when`."""
        action, began = rank.blocked, rank.now
        assert action is not None
        rank.blocked = None
        rank.now = max(began, when)
        heappush(self._heap, (rank.now, rank.index))
        if self._record_from <= action.minibatch < self._record_until:
            self.recorder.events.append(Event(rank.index, action, began, rank.now, rank.held))

    def _route(self, lane: Lane, action: Action) -> Route:
        """Make the route of a first message between two lanes."""
        peer = self.lanes[action.peer][action.peer_replica]
        if action.op is SEND_ACTIVATION:
            known, inbox, nbytes = lane.to_activations, peer.activations, lane.costs.output_bytes
        elif action.op is SEND_GRADIENT:
            known, inbox, nbytes = lane.to_gradients, peer.gradients, lane.costs.input_gradient_bytes
        else:
            known, inbox, nbytes = lane.to_evaluations, peer.evaluations, lane.costs.output_bytes
        path = self.network.path(lane.rank.index, peer.rank.index)
        route = Route(
            to=peer.rank,
            inbox=inbox,
            level=path.level,
            nbytes=nbytes,
            seconds=nbytes / path.bandwidth,
            latency_s=path.latency_s,
            egress=path.egress,
            ingress=path.ingress,
            # An all-reduce of the stage goes through its ranks' ports.
            shared=path.shared or lane.reduction is not None,
        )
        known[action.peer_replica] = route
        self.routes.append(route)
        return route

    # -- replicas of a stage ---------------------------------------------------------------------------------

    def _join(self, lanes: Sequence[Lane], bucket_bytes: int, kind: str) -> None:
        """Let replicas reduce and meet."""
        level, ports = self.network.ring([lane.rank.index for lane in lanes])
        size, costs = len(lanes), lanes[0].costs
        buckets = costs.buckets(bucket_bytes)
        reduction = Reduction(
            size=size,
            ready_s=[when for when, _ in buckets],
            bucket_s=[self.network.allreduce_s(level, nbytes, size, kind) for _, nbytes in buckets],
            ports=ports,
            level=level,
            nbytes=sum(nbytes for _, nbytes in buckets),
        )
        self.reductions[lanes[0].stage] = reduction
        # Small vectors are all that is exchanged, so latency is all that it takes.
        seconds = self.network.allreduce_s(level, 0, size, kind)
        average, collect = Meeting(size, seconds), Meeting(size, seconds)
        for lane in lanes:
            lane.reduction, lane.average, lane.collect = reduction, average, collect

    def _together(self, lane: Lane, action: Action) -> float | None:
        """A replica has come to R, A or C: when it can go on, None while it must wait."""
        if action.op is Op.REDUCE:
            return self._reduced(lane, action)
        meeting = lane.average if action.op is Op.AVERAGE else lane.collect if action.op is Op.COLLECT else None
        assert meeting is not None, action
        ends = meeting.come(lane.rank.now)
        if ends is not None:
            for other in self.lanes[lane.stage]:
                if other is not lane:
                    self._wake(other.rank, ends)
        return ends

    def _reduced(self, lane: Lane, action: Action) -> float | None:
        now = lane.rank.now
        if not lane.known:
            self._announce(lane, action, now, idle=True)
        lane.known = False
        done, lane.reduced_at = lane.reduced_at, None
        lane.waits_for_reduction = done is None
        return None if done is None else max(now, done)

    def _announce(self, lane: Lane, action: Action, now: float, *, idle: bool) -> None:
        """The replica's part of the stage's next all-reduce is known; the last one sets it going."""
        reduction = lane.reduction
        assert reduction is not None
        lane.closing, lane.known = False, True
        begins = reduction.idle(now) if idle else reduction.begun(now)
        if begins is not None:
            reduction.minibatch = action.minibatch
            heappush(self._heap, (begins, len(self.ranks) + lane.stage))

    def _reduce(self, stage: int, now: float) -> None:
        """A bucket of a stage can start."""
        reduction = self.reductions[stage]
        when, done = reduction.go(now)
        if self._record_from <= reduction.minibatch < self._record_until:
            action = Action(Op.REDUCE, stage, reduction.minibatch)
            name = f"all-reduce of stage {stage}"
            self.recorder.transfers.append(Transfer(name, action, *reduction.latest))
        if not done:
            heappush(self._heap, (when, len(self.ranks) + stage))
            return
        for lane in self.lanes[stage]:
            if lane.waits_for_reduction:
                lane.waits_for_reduction = False
                self._wake(lane.rank, when)
            else:
                lane.reduced_at = when


def _ranks(lanes: Sequence[Sequence[Lane]], ranks_of_stage: Sequence[Sequence[int]]) -> list[Rank]:
    """The ranks with their lanes, by index."""
    of_rank: dict[int, dict[int, Lane]] = {}
    for replicas, owners in zip(lanes, ranks_of_stage, strict=True):
        for lane, owner in zip(replicas, owners, strict=True):
            of_rank.setdefault(owner, {})[lane.stage] = lane
    ranks = [Rank(index, of_rank[index]) for index in sorted(of_rank)]
    for rank in ranks:
        for lane in rank.lanes.values():
            lane.rank = rank
    return ranks
