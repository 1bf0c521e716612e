"""The upper bound that the measured network sets to a run's throughput, whatever its software."""

from collections.abc import Sequence
from typing import NamedTuple

from hvdtrain.base import modes
from hvdtrain.base.numerics.compression import CODECS
from hvdtrain.runs.read import Run

# Flows between workers and servers, or hosts. Jobs with more than 512 by 512 get no bound.
MOST_FLOWS = 2**18


class _Flow(NamedTuple):
    """Bytes that a worker's share of a step sends from one host to another."""

    worker: int
    sender: str
    receiver: str
    size: float


def network_bound(run: Run, more_servers: Sequence[str] = ()) -> float | None:
    """Returns the highest throughput that the links between the run's hosts allow.

    Computing and latency count as nothing. In a step M bytes, the weights or with --local-steps H
    an H-th of them, go 2(n−1)/n times over each link of a ring of n workers. With servers each
    worker sends M bytes and receives M bytes. Both directions of a link are used at once. With k dedicated
    servers and links of B bytes/s a step takes at least max(M, nM/k)/B; with one server on each
    worker's host, (n+k−2)M/(kB). The bytes that leave and enter each host are counted here, so that
    any placement is covered. With leased shares, workers take shares as is best for the links.

    Args:
        more_servers: the hosts of further servers that the run did not have.

    Returns:
        Samples per second. None if no link was measured, if pushes may be left out, or if a worker
        that uses no link may take all leased shares.
    """
    busy = link_seconds(run, more_servers)
    if not busy or run.manifest.backup:
        return None
    batch = run.manifest.global_batch or 0
    if modes.declared(run.kind.mode).lockstep or run.manifest.shares in ("equal", "static"):
        step_s = max(map(sum, busy))
        return batch / step_s if step_s else None
    for seconds_of_worker in zip(*busy, strict=True):
        if not any(seconds_of_worker):
            return None
    from scipy.optimize import linprog

    # Maximises the shares per second of all workers. Each link is busy for a second at most.
    workers = run.kind.workers
    shares_per_s = -linprog([-1.0] * workers, A_ub=busy, b_ub=[1.0] * len(busy)).fun
    return float(batch / workers * shares_per_s)


def link_seconds(run: Run, more_servers: Sequence[str] = ()) -> list[list[float]]:
    """Returns for how long a share of each worker keeps the link of each host busy.

    Returns:
        Seconds: [hosts × 2 directions][workers]. Empty if no link was measured, the run does not
        tell enough, or there are too many ranks.
    """
    manifest = run.manifest
    kind = run.kind
    weights = manifest.trained_parameters or manifest.parameters
    bytes_per_weight = _wire_bytes(manifest.compression)
    bandwidth = _bandwidth(run)
    if (
        not weights
        or not bytes_per_weight
        or not manifest.global_batch
        or not any(bandwidth.values())
    ):
        return []
    if kind.mode not in modes.names() or kind.mode == "single":
        return []
    if kind.workers * max(kind.servers + len(more_servers), len(manifest.hosts)) > MOST_FLOWS:
        return []
    host_of: dict[int, str] = {}
    for host, facts in manifest.hosts.items():
        host_of.update(dict.fromkeys(facts.ranks, host))
    ranks = range(kind.workers + kind.servers)
    if not host_of.keys() >= set(ranks):
        return []
    servers = [*(host_of[rank] for rank in ranks[: kind.servers]), *more_servers]
    workers = [host_of[rank] for rank in ranks[kind.servers :]]
    size = bytes_per_weight * weights / run.local_steps
    flows = _server_flows(workers, servers, size) if servers else _ring_flows(workers, size)
    sent = {host: [0.0] * kind.workers for host in manifest.hosts}
    received = {host: [0.0] * kind.workers for host in manifest.hosts}
    # For a host that the measurement knew by another name.
    fastest = max(bandwidth.values())
    for flow in flows:
        if flow.sender != flow.receiver:
            sent[flow.sender][flow.worker] += flow.size / (bandwidth.get(flow.sender) or fastest)
            received[flow.receiver][flow.worker] += flow.size / (
                bandwidth.get(flow.receiver) or fastest
            )
    return [*sent.values(), *received.values()]


def _wire_bytes(compression: str | None) -> float | None:
    """Returns the bytes of a weight on the wire; None where they depend on the values."""
    kind, _, _ = (compression or "none").partition(":")
    codec = CODECS.get(kind)
    return codec.wire_bytes if codec else None


def _bandwidth(run: Run) -> dict[str, float]:
    """Returns the bytes/s of each host's fastest link, since a bound has to be generous."""
    bandwidth: dict[str, float] = {}
    for link in run.manifest.network.pairs:
        for host in (link.sender, link.receiver):
            bandwidth[host] = max(bandwidth.get(host, 0.0), link.gbit_s * 1e9 / 8)
    return bandwidth


def _server_flows(workers: Sequence[str], servers: Sequence[str], size: float) -> list[_Flow]:
    """Returns the flows of each worker's pushes, and of the weights that it pulls."""
    shard_size = size / len(servers)
    pushes = []
    for worker, host in enumerate(workers):
        pushes += [_Flow(worker, host, server, shard_size) for server in servers]
    pulls = [_Flow(push.worker, push.receiver, push.sender, push.size) for push in pushes]
    return pushes + pulls


def _ring_flows(workers: Sequence[str], size: float) -> list[_Flow]:
    """Returns the flows from each worker to the next of a ring."""
    count = len(workers)
    sent = 2 * (count - 1) / count * size
    return [
        _Flow(worker, host, workers[(worker + 1) % count], sent)
        for worker, host in enumerate(workers)
    ]
