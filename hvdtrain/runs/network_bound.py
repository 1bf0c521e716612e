"""What the measured network allows: no run can be faster, whatever its software does."""

from collections.abc import Sequence

from hvdtrain import modes
from hvdtrain.runs.read import Run

_BYTES = {"none": 4.0, "": 4.0, "fp16": 2.0}  # of a weight on the wire; of other codecs it depends on the values


def network_bound(run: Run, more_servers: Sequence[str] = ()) -> float | None:
    """The most samples/s that the links between the run's hosts carry, were computing and latency nothing.

    In a step the weights, M bytes, or with --local-steps H an H-th of them, go 2(n−1)/n times over each link of a ring
    of n; to servers each worker sends M and is sent M. Between two hosts, both directions are used at once: of
    dedicated servers, k of them, a step takes at least max(M, nM/k)/B, of servers beside the workers, one each host,
    (n+k−2)M/(kB). These follow from counting what leaves and enters each host, which is done here, whatever the
    placement. Where shares are leased, workers may take them as is best for the links. None where no link was measured,
    or a worker uses none and may have all shares, or pushes may be left out.

    Args:
        more_servers: the hosts of servers that the run did not have.
    """
    busy, batch, workers = link_seconds(run, more_servers), run.manifest.global_batch or 0, run.kind.workers
    if not busy or run.manifest.backup:
        return None
    if modes.declared(run.kind.mode).lockstep or run.manifest.shares in ("equal", "static"):
        longest = max(map(sum, busy))
        return batch / longest if longest else None
    if not all(map(any, zip(*busy, strict=True))):
        return None
    from scipy.optimize import linprog

    shares_per_s = -linprog([-1.0] * workers, A_ub=busy, b_ub=[1.0] * len(busy)).fun
    return float(batch / workers * shares_per_s)


def link_seconds(run: Run, more_servers: Sequence[str] = ()) -> list[list[float]]:
    """For how long a share of each worker, a column, keeps each host's link busy, a row for each way. Empty where no
    link was measured.
    """
    manifest, kind = run.manifest, run.kind
    weights = manifest.trained_parameters or manifest.parameters
    each = _BYTES.get(manifest.compression or "")
    home = {rank: host for host, facts in manifest.hosts.items() for rank in facts.ranks}
    bandwidth: dict[str, float] = {}  # bytes/s of a host's fastest link: a bound has to be generous
    for link in manifest.network.pairs:
        for host in (link.sender, link.receiver):
            bandwidth[host] = max(bandwidth.get(host, 0.0), link.gbit_s * 1e9 / 8)
    fastest = max(bandwidth.values(), default=0.0)  # for a host that the measurement knew by another name
    ranks = kind.workers + kind.servers
    unknown = kind.mode not in modes.names() or kind.mode == "single" or set(range(ranks)) - set(home)
    if unknown or not weights or not each or not manifest.global_batch or not fastest:
        return []
    size = each * weights / run.local_steps
    workers = [home[rank] for rank in range(kind.servers, ranks)]
    servers = [*(home[rank] for rank in range(kind.servers)), *more_servers]
    if servers:  # the push of a worker's gradients, and the weights that come back
        flows = [(w, at, s, size / len(servers)) for w, at in enumerate(workers) for s in servers]
        flows += [(w, s, at, much) for w, at, s, much in flows]
    else:
        share = 2 * (kind.workers - 1) / kind.workers * size
        flows = [(w, at, workers[(w + 1) % ranks], share) for w, at in enumerate(workers)]
    rows = {(host, way): [0.0] * kind.workers for host in manifest.hosts for way in ("sent", "received")}
    for worker, sender, receiver, much in flows:
        if sender != receiver:
            rows[sender, "sent"][worker] += much / (bandwidth.get(sender) or fastest)
            rows[receiver, "received"][worker] += much / (bandwidth.get(receiver) or fastest)
    return list(rows.values())
