"""What is simulated: a model's layers, what messages cost, and a cluster."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from hvdtrain import modes
from hvdtrain.config.run_config import WIRES

MODES = modes.names()
RING_MODES, SERVER_MODES = (
    [name for name in MODES if modes.declared(name).family == family] for family in (modes.RING, modes.SERVERS)
)
MIB = 2**20
BUCKET_BYTES = 4 * MIB  # of weights, that servers are sent as one: RunConfig.bucket_mb
WARM_UP = 1  # simulated steps that are not counted
LEAST_FREE = 0.1  # share of the cores of a host that is left however many processes it has


@dataclass(frozen=True)
class Layer:
    """A module with so many parameters, float32, with what follows it; seconds of computing for a worker's batch."""

    parameters: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Transport:
    """What carrying bytes costs: `transports` of a calibration, as README.md has them. Receiving includes adding."""

    message_us: float = 0.0
    operation_us: float = 0.0
    send_s_per_gb: float = 0.0
    receive_s_per_gb: float = 0.0
    server_send_s_per_gb: float = 0.0
    server_receive_s_per_gb: float = 0.0
    local_share: float = 1.0
    idle_cores: float = 0.0
    efficiency: float = 1.0


@dataclass(frozen=True)
class Codec:
    """What a compression costs the processors, and what it leaves of the bytes: `codecs` of a calibration."""

    encode_ms_per_mb: float = 0.0
    decode_ms_per_mb: float = 0.0
    wire_share: float = 1.0


@dataclass(frozen=True)
class Slow:
    """Stragglers: the factor of computing of each slow worker, by number; and by which any worker is slower at a step,
    with which probability.
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
        compression: the name of the codec that gradients are sent with.
        latency_s: one way.
        fixed_s: seconds of a step's computing that belong to no layer: data, loss, bookkeeping.
        optimizer_s_per_mb: processor seconds for each MB (10^6 bytes) of weights, on workers or servers.
        jitter: standard deviation of the logarithm of a step's computing time.
        cores: of a host; threads: that a worker computes with.
        on_processor: computing takes cores, as communication does; false of a GPU.
        workers_per_host: hosts are filled one after the other.
        placement: servers on hosts without workers, `dedicated`, or on the workers' hosts, `shared`.
        server_gbit: of the links of servers' hosts that have no worker; None: as all links.
        staleness: the bound of ps-ssp.
        under_way_bytes: bound of all workers' pushes under way to a server, shared evenly by the workers. (Where there
            are more servers than workers, ps.exchange lets a worker have less of it, so much to all servers together.)
        softsync: in ps-ssp and ps-async, N pushes make one update.
        wait_for, shares: as modes.Mode has them; empty: as the mode does by default.
        wire: of servers, one of WIRES.
        local_steps: of each worker, from one exchange to the next.
        replaces: so many workers, whose global batch one process has, with all cores of a host; 0: none.
        seed: of what is drawn: links that are shared, who is slow at random, jitter.
        round_steps: after so many all wait for the last in ps-ssp and ps-async, as before an evaluation; 0: never.
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
    staleness: int = 2
    softsync: bool = True
    wait_for: str = ""
    wire: str = WIRES[0]
    shares: str = ""
    local_steps: int = 1
    replaces: int = 0
    round_steps: int = 0
    under_way_bytes: int = 48 * MIB
    slow: Slow = Slow()
    seed: int = 0

    @property
    def in_lockstep(self) -> bool:
        return modes.declared(self.mode).lockstep

    @property
    def carrier(self) -> str:
        """The key of a calibration's transports that it has; rings without one of their own have `allreduce`."""
        of_servers = "ps" if self.wire == WIRES[0] else f"ps-{self.wire}"
        return of_servers if self.servers else self.mode

    @property
    def bytes(self) -> int:
        """Of the weights, and of the gradients before a codec."""
        return 4 * sum(layer.parameters for layer in self.layers)

    @property
    def wire_rate(self) -> float:
        """Bytes a second of payload that a host's link carries, each way."""
        return self.bandwidth_gbit * 1e9 / 8 * self.transport.efficiency

    @property
    def computing_s(self) -> float:
        """Of one worker's step, alone and undisturbed."""
        return self.fixed_s + sum(layer.forward_s + layer.backward_s for layer in self.layers)

    @property
    def waits_for_layers(self) -> bool:
        wait_for = self.wait_for or next(iter(modes.declared(self.mode).wait_for), "step")
        return wait_for == "layer" and self.local_steps == 1

    @property
    def is_leased(self) -> bool:
        return (self.shares or modes.declared(self.mode).shares[0]) == "leased"

    @property
    def factors(self) -> list[float]:
        """Of each worker's computing. With measured shares all take as long."""
        factors = [self.slow.workers.get(worker, 1.0) for worker in range(self.workers)]
        if self.shares == "measured":
            return [len(factors) / sum(1 / factor for factor in factors)] * len(factors)
        return factors

    def around(self, size: float, times: int = 2) -> float:
        """Bytes that a worker sends of so many that go around a ring so many times: 2(n-1)/n of them in an all-reduce
        (Patarasuk and Yuan, 2009).
        """
        return times * (self.workers - 1) / self.workers * size

    @property
    def optimizer_s(self) -> float:
        return self.optimizer_s_per_mb * self.bytes / 1e6

    def free_cores(self, processes: int, hosts: int) -> float:
        """What so many processes leave of the cores of so many hosts while they have nothing to do."""
        cores = self.cores * hosts
        return max(LEAST_FREE * cores, cores - processes * self.transport.idle_cores)


@dataclass(frozen=True)
class Outcome:
    """What a simulation came to.

    Attributes:
        step_s: wall seconds for one step of the job: a share for each worker, whoever takes it.
        exposed_comm_s: of them, waiting for messages, the mean over workers.
        staleness_mean: updates between reading weights and a push's use; 0 in lockstep.
        bytes_sent: of a worker in a step, payload.
        server_bytes_sent: of a server in a step of all workers.
        busiest_share: of all samples, what the worker has who has most.
    """

    step_s: float
    exposed_comm_s: float
    staleness_mean: float = 0.0
    bytes_sent: float = 0.0
    server_bytes_sent: float = 0.0
    busiest_share: float = 0.0
