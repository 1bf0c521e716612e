"""A simulated job with parameter servers: pushes and answers, piece by piece, as `hvdtrain.job.ps`
sends them.

A push costs the worker's io thread processor time. It takes the worker's link and the server's,
costs the server's io thread, and is added up. When the mode's policy says so, the server updates
the weights and answers, back the same way.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from hvdtrain.job.buckets.send_queue import BUCKETS_UNDER_WAY, SendQueue
from hvdtrain.job.ps.policy import PolicyDecision, Release
from hvdtrain.planning.engine import (
    EventLoop,
    IoThread,
    Join,
    Process,
    Processors,
    SharedLink,
    Then,
    go_on,
)
from hvdtrain.planning.layout import Detail, HostGroup, Piece, cut, host_groups
from hvdtrain.planning.policies import GroupPolicies, accept
from hvdtrain.planning.scenario import BUCKET_BYTES, WARM_UP, Scenario
from hvdtrain.planning.worker import SimulatedJob, Worker

# The connections to a server that are simulated one by one. With more workers each stands for
# several.
CONNECTIONS = 8


def _nothing() -> None:
    """Does nothing when it is called."""


class _Hosts:
    """A group of hosts: their links, cores and server processes.

    Attributes:
        up, down: the links of all these hosts as one, each way.
        rate: bytes of payload that they carry in a second, each way.
        servers: the number of server processes on all these hosts.
        io: the servers' io threads.
    """

    def __init__(
        self, group: HostGroup, scenario: Scenario, loop: EventLoop, draw: random.Random
    ) -> None:
        self.group = group
        # TCP shares a link more evenly among many workers with small buckets: "Links" in README.md.
        is_more_even = scenario.bucket_bytes < BUCKET_BYTES
        self.up = SharedLink(loop, draw, is_more_even)
        self.down = SharedLink(loop, draw, is_more_even)
        gbit = scenario.bandwidth_gbit
        if scenario.server_gbit and not group.workers:
            gbit = scenario.server_gbit
        self.rate = group.hosts * scenario.wire_rate * gbit / scenario.bandwidth_gbit
        processes = group.hosts * (group.servers + group.workers_per_host)
        self.cores = Processors(loop, scenario.free_cores(processes, group.hosts))
        self.servers = group.hosts * group.servers
        self.io = IoThread(self.cores, max(1, self.servers))

    def remote_share(self, other: "_Hosts") -> float:
        """Returns the share of the messages to other hosts that cross the network.

        Within a group each host sends to all.
        """
        return 1.0 if other is not self else 1 - 1 / self.group.hosts


class _Client(Worker):
    """A group of workers on one group of hosts.

    Attributes:
        io: the workers' io threads, which send and receive.
        queues: to each group of hosts, the pieces that wait.
        read: of each piece, the version of the weights that the workers have.
        ready_in: of each piece, the step whose gradient was ready last. The workers may have gone
            on to the next step when it is pushed.
    """

    def __init__(self, job: "SimulatedServers", hosts: _Hosts, times: int, factor: float) -> None:
        scenario = job.scenario
        slowest_of = times if scenario.in_lockstep else 1
        super().__init__(job, hosts.cores, times, factor, slowest_of)
        self.hosts = hosts
        self.io = IoThread(hosts.cores, times)
        # A piece may stand for several buckets, and so does the room.
        own_part = scenario.under_way_bytes / scenario.workers
        buckets = min(BUCKETS_UNDER_WAY, own_part / scenario.bucket_bytes)
        largest = max((piece.bytes for piece in job.pieces), default=0)
        self.queues = []
        for target in job.hosts:
            room = max(own_part * target.servers, buckets * largest)
            self.queues.append(SendQueue(room, lambda number: job.pieces[number].bytes))
        self.read = [0] * len(job.pieces)
        self.ready_in = [0] * len(job.pieces)
        self.tell_idle = partial(job.idle, self)

    def steps(self) -> Process:
        """See Worker."""
        yield from super().steps()
        self.tell_idle()


@dataclass(slots=True)
class _Transfer:
    """A message from each worker of a group to servers on a group of hosts, or to each worker.

    Attributes:
        client: the workers.
        source, target: the hosts that it comes from and goes to.
        size: bytes of all messages together.
        io: the threads that send.
        send_s: processor seconds of each of these threads until the first message is on the wire.
        rest_s: processor seconds for sending the others one after the other, while the first is on
            the wire; None: there are no others.
        outgoing, incoming: the connections at the ends of the source and of the target.
    """

    client: _Client
    source: _Hosts
    target: _Hosts
    size: float
    io: IoThread
    send_s: float
    rest_s: float | None = None
    outgoing: int = 1
    incoming: int = 1


class SimulatedServers(SimulatedJob):
    """A job with servers, each of which holds a range of the weights.

    Attributes:
        members: of each group of workers, their numbers in the policies.
        group_of: the group of each of these workers.
        updates_each: how many updates an update of a policy stands for.
        policies: of each piece, what decides when pushes are applied and answered.
        version: of each piece, the updates that it has had.
        held: of each piece, the groups that have pushed and are not answered, in the order of their
            pushes, and how many members of each may not go on yet.
    """

    def __init__(self, scenario: Scenario, steps: int, seed: str, detail: Detail) -> None:
        groups = host_groups(scenario, detail.groups)
        super().__init__(scenario, steps, seed, cut(scenario, groups, detail.pieces))
        self.hosts = [
            _Hosts(group, scenario, self.loop, random.Random(f"{seed} link {number}"))
            for number, group in enumerate(groups)
        ]
        clients = []
        for hosts in self.hosts:
            for factor, count in hosts.group.workers:
                clients.append(_Client(self, hosts, hosts.group.hosts * count, factor))
        self.workers = list(clients)
        policies = GroupPolicies(scenario, [client.times for client in clients])
        self.members = dict(zip(clients, policies.members, strict=True))
        self.group_of = [client for client in clients for _ in self.members[client]]
        self.updates_each = policies.updates_each
        self.policies = [policies.make() for _ in self.pieces]
        self.version = [0] * len(self.pieces)
        self.held: list[dict[_Client, int]] = [{} for _ in self.pieces]

    def refresh_s(self) -> float:
        """Returns how long all workers take to pull the newest weights after a round.

        The busiest link decides, that of a server's host or of a worker's.
        """
        scenario = self.scenario
        seconds = []
        for hosts in self.hosts:
            group = hosts.group
            of_all_servers = group.servers / scenario.servers
            elsewhere = scenario.workers - group.workers_per_host
            leaving = elsewhere * of_all_servers * scenario.bytes
            coming = group.workers_per_host * (1 - of_all_servers) * scenario.bytes
            seconds.append(max(leaving, coming) / (hosts.rate / group.hosts))
        return max(seconds)

    def send(self, worker: Worker, number: int) -> None:
        assert isinstance(worker, _Client)
        queue = worker.queues[self.pieces[number].owner]
        worker.ready_in[number] = worker.step
        queue.add(number)
        self._push_waiting(worker, queue)

    def _push_waiting(self, client: _Client, queue: SendQueue) -> None:
        """Pushes the pieces that wait, as far as they can be sent now."""
        while True:
            number = queue.next_with_room()
            if number is None:
                number = queue.next_over_limit()
            if number is None:
                return
            queue.send(number)
            self._push(client, number)

    def _push(self, client: _Client, number: int) -> None:
        transport = self.scenario.transport
        codec = self.scenario.codec
        piece = self.pieces[number]
        server = self.hosts[piece.owner]
        gigabytes = piece.bytes / 1e9
        size = piece.bytes * codec.wire_share
        send_s = self._cost(client.hosts, server, piece, size, transport.send_s_per_gb)
        send_s += gigabytes * codec.encode_ms_per_mb
        receive_s = self._cost(client.hosts, server, piece, size, transport.server_receive_s_per_gb)
        receive_s = (receive_s + gigabytes * codec.decode_ms_per_mb) / server.servers
        # The server takes the first while others are still on the wire, and the last after all.
        read = client.read[number]
        accept = Join(2, partial(self._accept, client, number, client.ready_in[number], read))
        first_came = partial(server.io.do, (client.times - 1) * receive_s, accept)
        all_came = partial(server.io.do, receive_s, accept)
        transfer = _Transfer(
            client,
            client.hosts,
            server,
            client.times * size,
            client.io,
            send_s,
            incoming=min(client.times, CONNECTIONS),
        )
        go_on(self._carry(transfer, first_came, all_came))

    def _accept(self, client: _Client, number: int, step: int, read: int) -> None:
        """Adds up a push, updates the weights if it is time, and answers whom the mode lets go on.

        Args:
            number: of the piece.
            step: of the push.
            read: the version of the weights that the gradient was computed with.
        """
        self.held[number][client] = len(self.members[client])

        def tell(member: int) -> PolicyDecision:
            return accept(self.policies[number], member, step, read, self.version[number])

        self._decide(client, number, tell)

    def idle(self, client: _Client) -> None:
        """Tells all policies that a group takes no more steps, so that no other waits for it."""
        for number, policy in enumerate(self.policies):
            tell = partial(policy.idle, step=client.step, at_barrier=True)
            self._decide(client, number, tell)

    def _decide(self, client: _Client, number: int, tell: Callable[[int], PolicyDecision]) -> None:
        """Carries out what a piece's policy decides about a message of each member of a group.

        Args:
            tell: tells the policy, given the member's number.
        """
        updates = 0
        released: list[Release] = []
        for member in self.members[client]:
            decision = tell(member)
            made = self.updates_each * len(decision.updates)
            updates += made
            self.version[number] += made
            released += decision.released
        if not updates:
            self._release(number, released)
            return
        piece = self.pieces[number]
        hosts = self.hosts[piece.owner]
        optimizer_s = updates * piece.bytes / 1e6 * self.scenario.optimizer_s_per_mb
        then = partial(self._release, number, released)
        hosts.cores.work(optimizer_s / hosts.servers, hosts.servers, then)

    def _release(self, number: int, released: Sequence[Release]) -> None:
        """Answers a piece's pushes, where all members of a group may take the next step."""
        held = self.held[number]
        for release in released:
            client = self.group_of[release.worker]
            held[client] -= 1
            if len(client.ends) >= WARM_UP:
                self._count_staleness(client, release.staleness)
        answered = [client for client, waiting in held.items() if not waiting]
        for client in answered:
            del held[client]
            self._answer(client, number)

    def _count_staleness(self, client: _Client, updates: int) -> None:
        """Counts pushes of a group, and the updates since it read the weights.

        Args:
            updates: as one member of the group has them, which may stand for several workers. Their
                updates come one after the other.
        """
        pushes = client.times / len(self.members[client])
        self.staleness_sum += pushes * (updates + (self.updates_each - 1) / 2)
        self.pushes += pushes

    def _answer(self, client: _Client, number: int) -> None:
        """Sends a piece's weights to the workers."""
        transport = self.scenario.transport
        piece = self.pieces[number]
        server = self.hosts[piece.owner]
        size = piece.bytes
        send_s = self._cost(client.hosts, server, piece, size, transport.server_send_s_per_gb)
        receive_s = self._cost(client.hosts, server, piece, size, transport.receive_s_per_gb)
        read = partial(self._answered, client, number, self.version[number])
        each_send_s = send_s / server.servers
        transfer = _Transfer(
            client,
            server,
            client.hosts,
            client.times * size,
            server.io,
            each_send_s,
            rest_s=(client.times - 1) * each_send_s if client.times > 1 else None,
            outgoing=min(client.times, CONNECTIONS),
        )
        go_on(self._carry(transfer, _nothing, partial(client.io.do, receive_s, read)))

    def _answered(self, client: _Client, number: int, version: int) -> None:
        piece = self.pieces[number]
        queue = client.queues[piece.owner]
        queue.answered(number)
        client.read[number] = version
        self._push_waiting(client, queue)
        self.weights_arrived(client, number)

    def _cost(
        self, hosts: _Hosts, server: _Hosts, piece: Piece, size: float, s_per_gb: float
    ) -> float:
        """Returns the processor seconds that a message costs at one end.

        A message that stays on its host costs less.
        """
        transport = self.scenario.transport
        remote = hosts.remote_share(server)
        crossing = remote + (1 - remote) * transport.local_share
        return piece.messages * transport.message_us * 1e-6 + size / 1e9 * crossing * s_per_gb

    def _carry(self, transfer: _Transfer, first_came: Then, all_came: Then) -> Process:
        """Sends messages, and has them come: over the links, or at once within a host.

        Args:
            transfer: the messages.
            first_came: called when the first message has come.
            all_came: called when all messages have come.
        """
        yield partial(transfer.io.do, transfer.send_s)
        if transfer.source.remote_share(transfer.target):
            all_sent = self._over_links(transfer, first_came, all_came)
        else:
            local_waits = self.scenario.transport.local_waits
            if local_waits:
                yield partial(self.loop.after, local_waits * transfer.send_s)
            first_came()
            all_sent = all_came
        if transfer.rest_s is not None:
            yield partial(transfer.io.do, transfer.rest_s)
        all_sent()

    def _over_links(self, transfer: _Transfer, first_came: Then, all_came: Then) -> Then:
        """Has messages come over the links of both ends, each connection alone.

        All have come when they have left the source, the target has taken them in, and the last
        one was handed to the link.

        Args:
            transfer, first_came, all_came: see _carry.

        Returns:
            What is to be called when the last message was handed to the link.
        """
        loop = self.loop
        latency = self.scenario.latency_s
        source = transfer.source
        target = transfer.target
        remote = source.remote_share(target)
        leaving_s = remote * transfer.size / transfer.outgoing / source.rate
        coming_s = remote * transfer.size / transfer.incoming / target.rate
        arrived = Join(transfer.incoming + 2, all_came)
        arrived_first = Join(1, first_came)

        def came() -> None:
            arrived_first()
            arrived()

        def first_byte_came() -> None:
            # From now on the message has a place at the other end.
            for number in range(transfer.incoming):
                connection = transfer.client, source, number
                target.down.take(connection, coming_s, _nothing, came)

        begins = Join(1, partial(loop.after, latency, first_byte_came))
        through = Join(transfer.outgoing, partial(loop.after, latency, arrived))
        for number in range(transfer.outgoing):
            connection = transfer.client, target, number
            source.up.take(connection, leaving_s, begins, through)
        return partial(loop.after, latency, arrived)
