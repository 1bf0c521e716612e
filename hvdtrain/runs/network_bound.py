"""What the measured network allows: no run can be faster, whatever its software does."""

from hvdtrain.runs.read import Run

_BYTES = {"none": 4.0, "": 4.0, "fp16": 2.0}  # of a weight on the wire; of other codecs it depends on the values


def network_bound(run: Run) -> float | None:
    """The most samples/s that the links between the run's hosts carry, were computing and latency nothing.

    In a step the weights, M bytes, go 2(n−1)/n times over each link of a ring of n; to servers each worker sends M and
    is sent M. Between two hosts, both directions are used at once: of dedicated servers, k of them, a step takes at
    least max(M, nM/k)/B, of servers beside the workers, one each host, (n+k−2)M/(kB). These follow from counting what
    leaves and enters each host, which is done here, whatever the placement.

    None where no link was measured, or nothing crosses one.
    """
    manifest, kind = run.manifest, run.kind
    weights = manifest.trained_parameters or manifest.parameters
    each = _BYTES.get(manifest.compression or "")
    if not weights or not each or not manifest.global_batch or kind.mode == "single":
        return None
    size = each * weights
    home = {rank: host for host, facts in manifest.hosts.items() for rank in facts.ranks}
    bandwidth: dict[str, float] = {}  # bytes/s of a host's fastest link: a bound has to be generous
    for link in manifest.network.pairs:
        for host in (link.sender, link.receiver):
            bandwidth[host] = max(bandwidth.get(host, 0.0), link.gbit_s * 1e9 / 8)
    sent = dict.fromkeys(manifest.hosts, 0.0)
    received = dict.fromkeys(manifest.hosts, 0.0)
    ranks = kind.workers + kind.servers
    if set(range(ranks)) - set(home):
        return None
    if kind.servers:
        crossings = [(w, s) for s in range(kind.servers) for w in range(kind.servers, ranks) if home[w] != home[s]]
        # The push of a worker's gradients, and the weights that come back.
        flows = [(a, b, size / kind.servers) for w, s in crossings for a, b in ((w, s), (s, w))]
    else:
        share = 2 * (kind.workers - 1) / kind.workers * size
        flows = [(r, (r + 1) % ranks, share) for r in range(ranks) if home[r] != home[(r + 1) % ranks]]
    for sender, receiver, much in flows:
        sent[home[sender]] += much
        received[home[receiver]] += much
    fastest = max(bandwidth.values(), default=0.0)  # for a host that the measurement knew by another name
    seconds = [max(sent[host], received[host]) / speed for host in sent if (speed := bandwidth.get(host, fastest))]
    longest = max(seconds, default=0.0)
    return manifest.global_batch / longest if longest else None
