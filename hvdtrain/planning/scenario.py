"""What is simulated: a job on a cluster, with its model's layers and what messages cost."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from hvdtrain.base import modes
from hvdtrain.base.config.run_config import WIRES
from hvdtrain.job.buckets.send_queue import UNDER_WAY, largest_push

MODES = modes.names()
RING_MODES = [name for name in MODES if modes.declared(name).family == modes.RING]
SERVER_MODES = [name for name in MODES if modes.declared(name).family == modes.SERVERS]
MIB = 2**20
# The most bytes of weights that travel as one message if there are few workers: RunConfig.bucket_mb.
BUCKET_BYTES = 4 * MIB
# Simulated steps that are not counted.
WARM_UP = 1
# The share of a host's cores that remains however many processes wait there.
LEAST_FREE = 0.1


@dataclass(frozen=True)
class Layer:
    """A module with float32 parameters, and the modules without parameters that follow it.

    Attributes:
        forward_s, backward_s: seconds of computing for a worker's batch.
    """

    parameters: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Transport:
    """What carrying bytes costs: an entry of a calibration's `transports`, see README.md.

    Receiving includes adding up.
    """

    message_us: float = 0.0
    operation_us: float = 0.0
    send_s_per_gb: float = 0.0
    receive_s_per_gb: float = 0.0
    server_send_s_per_gb: float = 0.0
    server_receive_s_per_gb: float = 0.0
    local_share: float = 1.0
    local_waits: float = 0.0
    idle_cores: float = 0.0
    efficiency: float = 1.0


@dataclass(frozen=True)
class Codec:
    """What a compression costs the processors, and the share of the bytes that it leaves: an entry
    of a calibration's `codecs`.
    """

    encode_ms_per_mb: float = 0.0
    decode_ms_per_mb: float = 0.0
    wire_share: float = 1.0


@dataclass(frozen=True)
class Stragglers:
    """Workers that compute slower than the others.

    Attributes:
        workers: the factor by which a worker is slower, by the worker's number.
        random_factor: the factor by which any worker is slower in a step, with the probability
            `random_share`.
    """

    workers: Mapping[int, float] = field(default_factory=dict)
    random_factor: float = 1.0
    random_share: float = 0.0


@dataclass(frozen=True)
class Scenario:
    """One job on one cluster.

    Attributes:
        layers: in forward order.
        bandwidth_gbit: of each host's link, each way.
        server_gbit: of the links of hosts that have servers and no worker; None: as all links.
        latency_s: one way.
        compression: the name of the codec that gradients are sent with.
        fixed_s: seconds of a step's computing that belong to no layer: data, loss, bookkeeping.
        optimizer_s_per_mb: processor seconds for each MB (10^6 bytes) of weights, on workers or
            servers.
        jitter: standard deviation of the logarithm of a step's computing time.
        cores: of a host.
        threads: with which a worker computes.
        on_processor: whether computing takes cores, as communication does; false for a GPU.
        workers_per_host: hosts are filled one after the other in a ring, and as
            `layout.launched_ranks` says where there are servers.
        placement: servers are on hosts without workers, `dedicated`, or on the workers' hosts,
            `shared`.
        ranks_by_host: the ranks on each host of a run with servers, which have the first ranks;
            empty: as `hvdtrain launch` places them.
        staleness: the bound of ps-ssp.
        softsync: in ps-ssp and ps-async, N pushes make one update.
        wait_for, shares: as modes.Mode has them; empty: the mode's default.
        wire: of servers, one of WIRES.
        local_steps: of each worker, from one exchange to the next.
        replaces: the number of workers that one process stands for, with their global batch and
            all cores of a host; 0: none.
        round_steps: in ps-ssp and ps-async all workers wait for the last one after so many steps,
            as before an evaluation; 0: never.
        under_way_bytes: the bound of all workers' pushes under way to a server, shared evenly by
            the workers. (Where there are more servers than workers, ps.push_exchange gives a worker
            less of it, one bound for all servers together.)
        seed: of everything that is drawn: the order on shared links, who is slow at random, jitter.
    """

    mode: str
    layers: tuple[Layer, ...] = ()
    workers: int = 1
    servers: int = 0
    bandwidth_gbit: float = 1.0
    server_gbit: float | None = None
    latency_s: float = 50e-6
    transport: Transport = Transport()
    compression: str = "none"
    codec: Codec = Codec()
    fixed_s: float = 0.0
    optimizer_s_per_mb: float = 0.0
    jitter: float = 0.0
    cores: float = 1
    threads: int = 1
    on_processor: bool = True
    workers_per_host: int = 1
    placement: str = "dedicated"
    ranks_by_host: tuple[tuple[int, ...], ...] = ()
    staleness: int = 2
    softsync: bool = True
    wait_for: str = ""
    wire: str = WIRES[0]
    shares: str = ""
    local_steps: int = 1
    replaces: int = 0
    round_steps: int = 0
    under_way_bytes: int = UNDER_WAY
    slow: Stragglers = Stragglers()
    seed: int = 0

    @property
    def bucket_bytes(self) -> int:
        """The most bytes of weights that travel as one message."""
        if not self.servers:
            return BUCKET_BYTES
        return largest_push(BUCKET_BYTES, self.workers, self.under_way_bytes)

    @property
    def in_lockstep(self) -> bool:
        return modes.declared(self.mode).lockstep

    @property
    def shards_optimizer(self) -> bool:
        return modes.declared(self.mode).shards_optimizer

    @property
    def transport_name(self) -> str:
        """The key of this job's costs in a calibration's `transports`.

        A ring without an entry there has the costs of `allreduce`.
        """
        if not self.servers:
            return self.mode
        return "ps" if self.wire == WIRES[0] else f"ps-{self.wire}"

    @property
    def bytes(self) -> int:
        """The size of the weights, and of the gradients before a codec."""
        return 4 * sum(layer.parameters for layer in self.layers)

    @property
    def wire_rate(self) -> float:
        """Bytes of payload that a host's link carries in a second, each way."""
        return self.bandwidth_gbit * 1e9 / 8 * self.transport.efficiency

    @property
    def computing_s(self) -> float:
        """Seconds that one worker computes in a step, alone and undisturbed."""
        return self.fixed_s + self.layers_s

    @property
    def layers_s(self) -> float:
        """Seconds of them that belong to layers."""
        return sum(layer.forward_s + layer.backward_s for layer in self.layers)

    @property
    def waits_for_layers(self) -> bool:
        """Whether each layer's forward waits for the layer's weights, and not the step for all."""
        wait_for = self.wait_for or next(iter(modes.declared(self.mode).wait_for), "step")
        return wait_for == "layer" and self.local_steps == 1

    @property
    def is_leased(self) -> bool:
        return (self.shares or modes.declared(self.mode).shares[0]) == "leased"

    @property
    def factors(self) -> list[float]:
        """How many times as long each worker computes. With measured shares all take as long."""
        factors = [self.slow.workers.get(worker, 1.0) for worker in range(self.workers)]
        if self.shares == "measured":
            return [len(factors) / sum(1 / factor for factor in factors)] * len(factors)
        return factors

    @property
    def hosts_with_workers(self) -> int:
        return -(-self.workers // self.workers_per_host)

    @property
    def optimizer_s(self) -> float:
        """Processor seconds of a step's optimizer, for all weights once."""
        return self.optimizer_s_per_mb * self.bytes / 1e6

    @property
    def server_optimizer_s(self) -> float:
        """Processor seconds of all servers' optimizers, while each worker has one exchange.

        Servers average the pushes of all workers, or apply each push by itself.
        """
        averages = self.in_lockstep or (self.softsync and self.local_steps == 1)
        return self.optimizer_s if averages else self.workers * self.optimizer_s

    @property
    def worker_optimizer_s(self) -> float:
        """Processor seconds of a worker's optimizer from one exchange to the next.

        Local steps are the worker's own. What an exchange brings is applied by servers, or else by
        each worker: all of it, or its shard.
        """
        local_s = self.local_steps * self.optimizer_s if self.local_steps > 1 else 0.0
        if self.servers:
            return local_s
        if self.shards_optimizer:
            return local_s + self.optimizer_s / self.workers
        return local_s + self.optimizer_s

    @property
    def worker_processor_s(self) -> float:
        """Processor seconds of a worker from one exchange to the next, without those of messages.

        All threads of a worker are busy in forward and backward, one with all else.
        """
        threads = self.threads if self.on_processor else 1
        step_s = threads * self.layers_s + self.fixed_s
        return self.local_steps * step_s + self.worker_optimizer_s

    def ring_bytes(self, size: float, times_around: int = 2, members: int = 0) -> float:
        """Returns how many bytes a worker sends while `size` bytes go around a ring.

        An all-reduce goes around twice and sends 2(n-1)/n of the size (Patarasuk and Yuan, 2009).

        Args:
            members: of the ring; 0: all workers.
        """
        members = members or self.workers
        return times_around * (members - 1) / members * size

    @property
    def members_between_hosts(self) -> int:
        """The members of the ring whose messages cross the network.

        Gloo's and MPI's ring lies along the hosts, which are filled one after the other: each host
        sends what one worker does. NCCL adds up within each host first: hosts are the members.
        """
        return self.workers if self.on_processor else self.hosts_with_workers

    def free_cores(self, processes: int, hosts: int) -> float:
        """Returns the cores that the processes on some hosts leave free while they wait."""
        cores = self.cores * hosts
        return max(LEAST_FREE * cores, cores - processes * self.transport.idle_cores)


@dataclass(frozen=True)
class SimulatedStep:
    """What a simulation says of a step of the job: a share for each worker, whoever takes it.

    Attributes:
        step_s: wall seconds.
        exposed_comm_s: the part of them in which a worker waits for messages, the mean over
            workers.
        staleness_mean: updates between reading weights and using the push; 0 in lockstep.
        bytes_sent: payload that a worker sends.
        server_bytes_sent: payload that a server sends to all workers.
        busiest_share: the share of all samples that the worker with most of them has.
    """

    step_s: float
    exposed_comm_s: float
    staleness_mean: float = 0.0
    bytes_sent: float = 0.0
    server_bytes_sent: float = 0.0
    busiest_share: float = 0.0
