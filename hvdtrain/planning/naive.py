"""Rules that need no simulation, which stand beside predictions of published tables."""

from hvdtrain.planning.scenario import Scenario


def wire_s(job: Scenario) -> float:
    """Returns the seconds that a step's bytes take on the busiest link, which never waits.

    Of a ring of n hosts 2(n-1)M/(nB) (Patarasuk and Yuan, 2009); with k servers on hosts of their
    own max(M, nM/k)/B; beside workers (n+k-2)M/(kB), since a server sends its share to n-1 others,
    and a worker gradients, which alone a codec makes smaller, to k-1.
    """
    n = job.workers
    k = job.servers
    share = job.codec.wire_share
    if job.hosts_with_workers < 2 and (not k or job.placement == "shared"):
        return 0.0
    if not k:
        messages = job.ring_bytes(share, members=job.members_between_hosts)
    elif job.placement == "dedicated":
        messages = max(1, n / k)
    else:
        messages = (n - 1 + (k - 1) * share) / k
    return messages * job.bytes / job.wire_rate


def slower_of_both_s(job: Scenario) -> float:
    """Returns the seconds of computing or of the wire, whichever takes longer."""
    return max(job.computing_s, wire_s(job))
