"""A job with parameter servers, simulated: pushes and answers, piece by piece, as `hvdtrain.ps` does it.

A push costs the worker's io thread processor time, takes its host's link and the server's, costs the server's io
thread, and is added up there. When the mode has it so, the server updates and answers, back the same way. Forward of a
layer waits for the answers to all of its pieces. Of pieces that wait to be pushed, what forward needs first goes first,
as far as there is room under way (see ps.exchange).
"""

import math
import random
from collections.abc import Iterable

from hvdtrain.plan.engine import Clock, Link, Processors, Then, Thread
from hvdtrain.plan.layout import FINE, Detail, HostGroup, cut, host_groups
from hvdtrain.plan.pace import Pace
from hvdtrain.plan.scenario import Outcome, Scenario

CONNECTIONS = 8  # to a server that are simulated one by one; each of more workers' stands for several
WARM_UP = 1  # steps that are not counted
# Of a round, so many steps and shares are simulated: of a longer one the rest is taken to go on as they did.
LEAST_ROUND, ROUND_SHARES = 4, 100


class _Hosts:
    """A group of hosts: their links, cores and server processes."""

    def __init__(
        self, number: int, group: HostGroup, scenario: Scenario, clock: Clock, cores: Processors, draw: random.Random
    ) -> None:  # fmt: skip
        self.number, self.group = number, group
        self.up, self.down = Link(clock, draw), Link(clock, draw)
        self.rate = group.hosts * scenario.bandwidth * scenario.transport.efficiency
        self.cores = cores
        self.servers = group.hosts * group.servers
        self.io = Thread(cores, max(1, self.servers))


class _Workers:
    """Workers of a group that do the same at the same time.

    Args:
        times: how many.
        factor: of their computing.
    """

    def __init__(self, job: "ServerJob", hosts: _Hosts, times: int, factor: float, name: str) -> None:
        self.job, self.hosts, self.times, self.factor, self.name = job, hosts, times, factor, name
        self.io = Thread(hosts.cores, times)
        self.step = 0
        self.missing = [0] * len(job.scenario.layers)  # pieces of each layer that are not fresh
        self.lacking = [0] * len(job.pieces)  # layers whose gradients each piece waits for
        # What waits to be pushed, as it became ready; what is under way; the piece that is under way though there
        # was no room: for each group of hosts with servers.
        windows = len(job.rooms)
        self.queues: list[dict[int, None]] = [{} for _ in range(windows)]
        self.under_way, self.extra = [0.0] * windows, [-1] * windows
        self.read = [0] * len(job.pieces)  # version of each piece
        self.given: list[int] = []  # answers that wait for the others, where weights are read all at once
        self.waits_for = -1
        self.waits_since = 0.0
        self.ends: list[float] = []
        self.waited: list[float] = []
        # Of the slowest of the group, where all wait for it.
        self.paces = Pace(job.scenario, job.random, times if job.scenario.mode == "ps-sync" else 1)
        self.pace = 1.0

    def begin(self) -> None:
        if not self.job.takes_share(self):
            return
        self.step += 1
        self.pace = self.factor * self.paces.next()
        self.waited.append(0.0)
        scenario = self.job.scenario
        self.lacking = [len(piece.layers) for piece in self.job.pieces]
        self._compute("other", scenario.fixed_s, lambda: self._forward(0))

    def _compute(self, name: str, seconds: float, then: Then) -> None:
        job, seconds = self.job, seconds * self.pace
        if job.clock.spans is not None and seconds:
            then = job.clock.traced(f"{self.name} compute", name, job.clock.now, then)
        if job.scenario.on_processor:
            self.hosts.cores.work(seconds, self.times * job.scenario.threads, then)
        else:
            job.clock.at(job.clock.now + seconds, then)

    def _forward(self, layer: int) -> None:
        layers = self.job.scenario.layers
        if layer == len(layers):
            self._backward(layer - 1)
            return
        late = self.missing[layer] if self.job.scenario.overlap == "both" else sum(self.missing)
        if late:
            self.waits_for, self.waits_since = layer, self.job.clock.now
            return
        self._compute(f"forward {layers[layer].name}", layers[layer].forward_s, lambda: self._forward(layer + 1))

    def _backward(self, layer: int) -> None:
        if layer < 0:
            if self.job.scenario.overlap == "none":
                self._push_layers(range(len(self.missing) - 1, -1, -1))
            self.ends.append(self.job.clock.now)
            self.job.ended(self)
            self.begin()
            return

        def done() -> None:
            if self.job.scenario.overlap != "none":
                self._push_layers((layer,))
            self._backward(layer - 1)

        own = self.job.scenario.layers[layer]
        self._compute(f"backward {own.name}", own.backward_s, done)

    def _push_layers(self, layers: Iterable[int]) -> None:
        for layer in layers:
            for number in self.job.pieces_of[layer]:
                self.lacking[number] -= 1
                if not self.lacking[number]:
                    for own in self.job.pieces[number].layers:
                        self.missing[own] += 1
                    self.queues[self.job.pieces[number].owner][number] = None
        for window in range(len(self.queues)):
            self.send(window)

    def send(self, window: int) -> None:
        """Push what waits, as far as there is room."""
        queue, room = self.queues[window], self.job.rooms[window]
        while queue:
            first = min(queue)
            if not self.under_way[window] or self.under_way[window] + self.job.pieces[first].bytes <= room:
                number = first
            elif self.extra[window] < 0:
                number = self.extra[window] = next(iter(queue))
            else:
                return
            del queue[number]
            self.under_way[window] += self.job.pieces[number].bytes
            self.job.push(self, number, self.step)

    def answered(self, number: int, version: int) -> None:
        piece = self.job.pieces[number]
        window = self.job.pieces[number].owner
        self.under_way[window] -= piece.bytes
        if self.extra[window] == number:
            self.extra[window] = -1
        self.read[number] = version
        for layer in piece.layers:
            self.missing[layer] -= 1
        self.send(window)
        layer = self.waits_for
        if layer >= 0:
            late = self.missing[layer] if self.job.scenario.overlap == "both" else sum(self.missing)
            if not late:
                waited = self.job.clock.now - self.waits_since
                self.waited[-1] += waited
                self.waits_for = -1
                if waited:
                    self.job.clock.span(f"{self.name} compute", "wait", self.waits_since)
                self._forward(layer)


class ServerJob:
    """Simulates `steps` steps of each worker after a first one.

    Args:
        seed: of the jitter of computing.
        trace: keep what was done in clock.spans.
    """

    def __init__(
        self, scenario: Scenario, steps: int = 3, seed: str = "", detail: Detail = FINE, trace: bool = False
    ) -> None:
        self.scenario, self.clock, self.random = scenario, Clock(), random.Random(seed)
        self.round = min(scenario.round_steps, max(LEAST_ROUND, ROUND_SHARES // scenario.workers))
        # How many are left in the round, and when the last one was taken.
        self.shares, self.leased_s = self.round * scenario.workers or math.inf, 0.0
        self.steps = math.inf if self.round else steps
        if trace:
            self.clock.spans = []
        groups = host_groups(scenario, detail.groups)
        machine = Processors(self.clock, scenario.free_cores(sum(group.processes for group in groups), 1))
        self.hosts = [
            _Hosts(
                number, group, scenario, self.clock,
                machine if scenario.one_machine
                else Processors(self.clock, scenario.free_cores(group.processes, group.hosts)),
                random.Random(f"{seed} link {number}"),
            )
            for number, group in enumerate(groups)
        ]  # fmt: skip
        self.pieces = cut(scenario, groups, detail.pieces)
        self.pieces_of: list[list[int]] = [[] for _ in scenario.layers]
        for number, piece in enumerate(self.pieces):
            for layer in piece.layers:
                self.pieces_of[layer].append(number)
        most = scenario.under_way_bytes
        self.rooms = [min(most * max(1, h.servers), most * h.servers / scenario.workers) for h in self.hosts]
        self.workers = [
            _Workers(self, hosts, hosts.group.hosts * count, factor, f"worker group {hosts.number}")
            for hosts in self.hosts
            for factor, count in hosts.group.workers
        ]
        self.pushed = [[0] * len(self.workers) for _ in self.pieces]  # the step of each group's last push
        self.came = [0] * len(self.pieces)  # pushes that wait to be an update
        self.version = [0] * len(self.pieces)
        self.held: list[list[tuple[_Workers, int]]] = [[] for _ in self.pieces]
        self.staleness_sum = self.pushes = 0.0
        self._left = len(self.workers)

    def run(self) -> Outcome:
        for worker in self.workers:
            worker.begin()
        self.clock.run(lambda: self._left == 0)
        total = sum(worker.times for worker in self.workers)
        rate = waiting = 0.0
        for worker in self.workers:
            began, ended = (0.0, self.clock.now) if self.round else (worker.ends[WARM_UP - 1], worker.ends[-1])
            steps = [waited for end, waited in zip(worker.ends, worker.waited, strict=False) if end > began]
            rate += worker.times * len(steps) / (ended - began)
            waiting += worker.times / total * sum(steps) / (ended - began)
        step_s = total / rate
        if self.round > 1:
            step_s += (1 - self.round / self.scenario.round_steps) * (self.leased_s / (self.round - 1) - step_s)
        sent = self.scenario.bytes * self.scenario.wire_share
        return Outcome(
            step_s=step_s, exposed_comm_s=waiting * step_s,
            staleness_mean=self.staleness_sum / self.pushes if self.pushes else 0.0,
            bytes_sent=sent, server_bytes_sent=self.scenario.bytes * total / self.scenario.servers,
        )  # fmt: skip

    def takes_share(self, worker: _Workers) -> bool:
        """Whether there is another share for a group of workers."""
        if self.shares <= 0 or (not self.scenario.leased and 0 < self.round == worker.step):
            return False
        self.shares, self.leased_s = self.shares - worker.times, self.clock.now
        return True

    def ended(self, worker: _Workers) -> None:
        """A group has taken a step: the job is over when each has enough, those that are faster more."""
        if len(worker.ends) == WARM_UP + self.steps:
            self._left -= 1

    def push(self, worker: _Workers, number: int, step: int) -> None:
        piece, transport, times = self.pieces[number], self.scenario.transport, worker.times
        size = piece.bytes * self.scenario.wire_share
        server = self.hosts[piece.owner]
        gigabytes = size / 1e9 * self._cost_share(worker.hosts, server)
        cost = piece.messages * transport.message_s + gigabytes * transport.send_s_per_gb
        cost += piece.bytes / 1e6 * self.scenario.encode_s_per_mb
        taken = piece.messages * transport.message_s + gigabytes * transport.server_receive_s_per_gb
        taken += piece.bytes / 1e6 * self.scenario.decode_s_per_mb
        read = worker.read[number]
        both = _Join(2, lambda: self._accept(worker, number, step, read))
        # The server takes the first while others are still on the wire, and the last after all of them.
        self._carry(
            worker, worker.hosts, server, times * size, "push", cost,
            first=lambda: server.io.do((times - 1) * taken / server.servers, both),
            last=lambda: server.io.do(taken / server.servers, both),
        )  # fmt: skip

    def _carry(
        self, worker: _Workers, source: _Hosts, target: _Hosts, size: float, name: str, cost: float,
        first: Then, last: Then,
    ) -> None:  # fmt: skip
        """Take a message of each of a group's workers from hosts to others: not over a link where they are the same.

        Args:
            size: bytes of all of them together.
            cost: processor seconds of sending one.
            first, last: called when the first of them is there, and the last.
        """
        clock, times, latency = self.clock, worker.times, self.scenario.latency_s
        from_worker = source is worker.hosts and name == "push"
        io = worker.io if from_worker else source.io
        share = cost if from_worker else cost / source.servers  # seconds until one is sent
        remote = _remote(source, target)
        # At the servers' end, each worker has a connection of its own.
        connections = min(times, CONNECTIONS)
        outgoing, incoming = (1, connections) if from_worker else (connections, 1)
        leaving, coming = remote * size / outgoing / source.rate, remote * size / incoming / target.rate

        def leaves() -> None:
            if not remote:
                first()
                sent(last)
                return
            arrived, there = _Join(outgoing + incoming + 1, last), _Join(1, first)

            def through() -> None:
                clock.span(f"host group {source.number} up", name, clock.now - leaving)
                clock.at(clock.now + latency, arrived)

            def came() -> None:
                there()
                arrived()

            def reached() -> None:  # its first byte: from then on it has a place at the other end
                for number in range(incoming):
                    target.down.take((worker, source, number), coming, _nothing, came)

            begins = _Join(1, lambda: clock.at(clock.now + latency, reached))
            for number in range(outgoing):
                source.up.take((worker, target, number), leaving, begins, through)
            sent(lambda: clock.at(clock.now + latency, arrived))

        def sent(then: Then) -> None:
            """The rest of them are sent one after the other, while the first are on the wire."""
            if from_worker or times == 1:
                then()
            else:
                io.do((times - 1) * share, then)

        io.do(share, leaves)

    def _cost_share(self, source: _Hosts, target: _Hosts) -> float:
        """What a byte of a message costs the processors, over one that crosses the network."""
        remote = _remote(source, target)
        return remote + (1 - remote) * self.scenario.transport.local_share

    def _accept(self, worker: _Workers, number: int, step: int, read: int) -> None:
        """A server has a push: who is answered now, and whether the weights are updated before."""
        index, mode, workers = self.workers.index(worker), self.scenario.mode, self.scenario.workers
        self.pushed[number][index] = step
        if len(worker.ends) >= WARM_UP and mode != "ps-sync":
            ahead = 0 if self.scenario.softsync else (worker.times - 1) / 2
            self.staleness_sum += worker.times * (self.version[number] - read + ahead)
            self.pushes += worker.times
        self.came[number] += worker.times
        self.held[number].append((worker, step))
        updates = self.came[number] // workers if self._averages else self.came[number]
        if not updates:
            self._answer(number)
            return
        self.came[number] -= updates * (workers if self._averages else 1)
        self.version[number] += updates
        piece, hosts = self.pieces[number], self.hosts[self.pieces[number].owner]
        seconds = updates * piece.bytes / 1e6 * self.scenario.optimizer_s_per_mb / hosts.servers
        hosts.cores.work(seconds, hosts.servers, lambda: self._answer(number))

    @property
    def _averages(self) -> bool:
        return self.scenario.mode == "ps-sync" or self.scenario.softsync

    def _answer(self, number: int) -> None:
        held = self.held[number]
        if self.scenario.mode == "ps-sync":
            if self.came[number]:
                return
            free, self.held[number] = held, []
        elif self.scenario.mode == "ps-ssp":
            limit = min(self.pushed[number]) + self.scenario.staleness
            free = [(worker, step) for worker, step in held if step <= limit]
            self.held[number] = [(worker, step) for worker, step in held if step > limit]
        else:
            free, self.held[number] = held, []
        for worker, _ in free:
            self._give(worker, number)

    def _give(self, worker: _Workers, number: int) -> None:
        """Answer a push, at once or, where weights are read only when all gradients are in, with all others."""
        if self.scenario.overlap == "both":
            self._send(worker, number)
            return
        worker.given.append(number)
        if len(worker.given) == len(self.pieces):
            given, worker.given = sorted(worker.given), []
            for own in given:
                self._send(worker, own)

    def _send(self, worker: _Workers, number: int) -> None:
        piece, transport = self.pieces[number], self.scenario.transport
        hosts, version = self.hosts[piece.owner], self.version[number]
        size = piece.bytes / 1e9 * self._cost_share(hosts, worker.hosts)
        given = piece.messages * transport.message_s + size * transport.server_send_s_per_gb
        taken = piece.messages * transport.message_s + size * transport.receive_s_per_gb

        def came() -> None:
            worker.io.do(taken, lambda: worker.answered(number, version))

        self._carry(worker, hosts, worker.hosts, worker.times * piece.bytes, "answer", given, first=_nothing, last=came)


class _Join:
    """Goes on when it has been called so many times."""

    def __init__(self, calls: int, then: Then) -> None:
        self.calls, self.then = calls, then

    def __call__(self) -> None:
        self.calls -= 1
        if not self.calls:
            self.then()


def _remote(source: _Hosts, target: _Hosts) -> float:
    """The share of messages from some hosts to others that cross the network: in a group, each host sends to all."""
    return 1.0 if source is not target else 1 - 1 / source.group.hosts


def _nothing() -> None:
    pass
