"""A job with parameter servers, simulated: pushes and answers, piece by piece, as `hvdtrain.ps` does it.

A push costs the worker's io thread processor time, takes the worker's link and the server's, costs the server's io
thread, and is added up. When the mode says so, the server updates and answers, back the same way.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from hvdtrain import modes
from hvdtrain.planning.engine import Clock, Join, Link, Process, Processors, Then, Thread, go_on
from hvdtrain.planning.layout import Detail, HostGroup, Piece, cut, host_groups
from hvdtrain.planning.scenario import WARM_UP, Scenario
from hvdtrain.planning.worker import Exchange, Worker

CONNECTIONS = 8  # to a server that are simulated one by one; each of more workers' stands for several


class _Hosts:
    """A group of hosts: their links, cores and server processes."""

    def __init__(self, group: HostGroup, scenario: Scenario, clock: Clock, draw: random.Random) -> None:
        self.group = group
        self.up, self.down = Link(clock, draw), Link(clock, draw)
        workers = sum(count for _, count in group.workers)
        gbit = scenario.bandwidth_gbit if workers else scenario.server_gbit or scenario.bandwidth_gbit
        self.rate = group.hosts * scenario.wire_rate * gbit / scenario.bandwidth_gbit
        self.cores = Processors(clock, scenario.free_cores(group.hosts * (group.servers + workers), group.hosts))
        self.servers = group.hosts * group.servers
        self.io = Thread(self.cores, max(1, self.servers))

    def remote_share(self, other: "_Hosts") -> float:
        """The share of messages to others that cross the network: in a group, each host sends to all."""
        return 1.0 if other is not self else 1 - 1 / self.group.hosts


@dataclass
class _Window:
    """What a group of workers pushes to the servers of one group of hosts: of what waits, what forward needs first goes
    first, as far as there is room for its bytes. Without room one `extra` piece may go, which has waited longest, and
    for which others may wait (see ps.exchange); -1: none.
    """

    room: float
    queue: dict[int, None] = field(default_factory=dict)
    under_way: float = 0.0
    extra: int = -1

    def next(self, pieces: Sequence[Piece]) -> int | None:
        """Take the piece that goes next out of the queue; None where all have to wait."""
        number = min(self.queue, default=-1)
        is_full = self.under_way and self.under_way + pieces[number].bytes > self.room
        if number < 0 or (is_full and self.extra >= 0):
            return None
        if is_full:
            number = self.extra = next(iter(self.queue))
        del self.queue[number]
        self.under_way += pieces[number].bytes
        return number


class _Client(Worker):
    """With io threads that send and receive, a window to each group of hosts, and the version of each piece read."""

    def __init__(self, exchange: "Servers", hosts: _Hosts, times: int, factor: float) -> None:
        scenario = exchange.scenario
        super().__init__(exchange, hosts.cores, times, factor, times if scenario.in_lockstep else 1)
        self.hosts, self.io = hosts, Thread(hosts.cores, times)
        most, workers = scenario.under_way_bytes, scenario.workers
        self.windows = [_Window(min(most * max(1, h.servers), most * h.servers / workers)) for h in exchange.hosts]
        self.read = [0] * len(exchange.pieces)


class Servers(Exchange):
    """Pushes and answers of the pieces that each group of servers holds."""

    def __init__(self, scenario: Scenario, steps: int, seed: str, detail: Detail) -> None:
        groups = host_groups(scenario, detail.groups)
        super().__init__(scenario, steps, seed, cut(scenario, groups, detail.pieces))
        self.hosts = [
            _Hosts(group, scenario, self.clock, random.Random(f"{seed} link {number}"))
            for number, group in enumerate(groups)
        ]
        clients = [
            _Client(self, hosts, hosts.group.hosts * count, factor)
            for hosts in self.hosts
            for factor, count in hosts.group.workers
        ]
        self.workers = list(clients)
        self.averages = scenario.in_lockstep or scenario.softsync
        self.pushed = [dict.fromkeys(clients, 0) for _ in self.pieces]  # the step of each group's last push
        self.came = [0] * len(self.pieces)  # pushes that wait to be an update
        self.version = [0] * len(self.pieces)
        self.held: list[list[tuple[_Client, int]]] = [[] for _ in self.pieces]

    def send(self, worker: Worker, number: int) -> None:
        assert isinstance(worker, _Client)
        window = worker.windows[self.pieces[number].owner]
        window.queue[number] = None
        self._push(worker, window)

    def _answered(self, worker: _Client, number: int, version: int) -> None:
        piece = self.pieces[number]
        window = worker.windows[piece.owner]
        window.under_way -= piece.bytes
        if window.extra == number:
            window.extra = -1
        worker.read[number] = version
        self._push(worker, window)
        self.arrived(worker, number)

    def _push(self, worker: _Client, window: _Window) -> None:
        """Push what waits, as far as there is room."""
        transport, codec = self.scenario.transport, self.scenario.codec
        while (number := window.next(self.pieces)) is not None:
            piece = self.pieces[number]
            server, gigabytes, size = self.hosts[piece.owner], piece.bytes / 1e9, piece.bytes * codec.wire_share
            sent = self._cost(worker.hosts, server, piece, size, transport.send_s_per_gb)
            sent += gigabytes * codec.encode_ms_per_mb
            taken = self._cost(worker.hosts, server, piece, size, transport.server_receive_s_per_gb)
            taken = (taken + gigabytes * codec.decode_ms_per_mb) / server.servers
            both = Join(2, partial(self._accept, worker, number, worker.step, worker.read[number]))
            # The server takes the first while others are still on the wire, and the last after all of them.
            first = partial(server.io.do, (worker.times - 1) * taken, both)
            last = partial(server.io.do, taken, both)
            go_on(self._carry(worker, server, worker.times * size, True, sent, first, last))

    def _answer(self, worker: _Client, number: int) -> None:
        piece, server, transport = self.pieces[number], self.hosts[self.pieces[number].owner], self.scenario.transport
        sent = self._cost(worker.hosts, server, piece, piece.bytes, transport.server_send_s_per_gb)
        taken = self._cost(worker.hosts, server, piece, piece.bytes, transport.receive_s_per_gb)
        last = partial(worker.io.do, taken, partial(self._answered, worker, number, self.version[number]))
        go_on(self._carry(worker, server, worker.times * piece.bytes, False, sent, lambda: None, last))

    def _cost(self, hosts: _Hosts, server: _Hosts, piece: Piece, size: float, s_per_gb: float) -> float:
        """Processor seconds of one end of a message, which cost less where it stays on its host."""
        remote, transport = hosts.remote_share(server), self.scenario.transport
        crossing = remote + (1 - remote) * transport.local_share
        return piece.messages * transport.message_us * 1e-6 + size / 1e9 * crossing * s_per_gb

    def _carry(
        self, worker: _Client, server: _Hosts, size: float, is_push: bool, cost: float, first: Then, last: Then
    ) -> Process:
        """Take a message of each of a group's workers to servers, or from them: `size` bytes in all, whose sending
        costs so many processor seconds each. Calls `first` when the first has come, and `last` after all.
        """
        clock, latency = self.clock, self.scenario.latency_s
        source, target = (worker.hosts, server) if is_push else (server, worker.hosts)
        io, share = (worker.io, cost) if is_push else (server.io, cost / server.servers)
        # Of answers the others are sent one after the other, while the first are on the wire.
        rest = [] if is_push or worker.times == 1 else [partial(io.do, (worker.times - 1) * share)]
        # At the servers' end, each worker has a connection.
        connections = min(worker.times, CONNECTIONS)
        outgoing, incoming = (1, connections) if is_push else (connections, 1)
        remote = source.remote_share(target)
        leaving, coming = remote * size / outgoing / source.rate, remote * size / incoming / target.rate
        yield partial(io.do, share)
        if not remote:
            first()
            yield from rest
            last()
            return
        arrived, arrived_first = Join(outgoing + incoming + 1, last), Join(1, first)

        def came() -> None:
            arrived_first()
            arrived()

        def reached() -> None:  # its first byte: from then on it has a place at the other end
            for number in range(incoming):
                target.down.take((worker, source, number), coming, lambda: None, came)

        begins = Join(1, partial(clock.after, latency, reached))
        through = partial(clock.after, latency, arrived)
        for number in range(outgoing):
            source.up.take((worker, target, number), leaving, begins, through)
        yield from rest
        clock.after(latency, arrived)

    def _accept(self, worker: _Client, number: int, step: int, read: int) -> None:
        """A server has a push: who is answered, and whether the weights are updated before."""
        scenario, workers = self.scenario, self.scenario.workers if self.averages else 1
        self.pushed[number][worker] = step
        if len(worker.ends) >= WARM_UP and not scenario.in_lockstep:
            ahead = 0 if scenario.softsync else (worker.times - 1) / 2
            self.staleness_sum += worker.times * (self.version[number] - read + ahead)
            self.pushes += worker.times
        self.came[number] += worker.times
        self.held[number].append((worker, step))
        updates, self.came[number] = divmod(self.came[number], workers)
        if not updates:
            self._release(number)
            return
        self.version[number] += updates
        hosts = self.hosts[self.pieces[number].owner]
        seconds = updates * self.pieces[number].bytes / 1e6 * scenario.optimizer_s_per_mb / hosts.servers
        hosts.cores.work(seconds, hosts.servers, partial(self._release, number))

    def _release(self, number: int) -> None:
        """Answer those pushes of a piece whose workers the mode lets take their next step."""
        limit = math.inf
        if self.scenario.in_lockstep and self.came[number]:
            return
        if "staleness" in modes.declared(self.scenario.mode).options:
            limit = min(self.pushed[number].values()) + self.scenario.staleness
        held = self.held[number]
        self.held[number] = [(worker, step) for worker, step in held if step > limit]
        for worker, step in held:
            if step <= limit:
                self._answer(worker, number)
