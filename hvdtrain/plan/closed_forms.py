"""What a step takes by formula: a cross-check of the simulation where nothing overlaps or one thing decides.

M bytes, B bytes a second each way, n workers, k servers, on links that are busy both ways all the time.
"""

from hvdtrain.plan.scenario import RING_MODES, Scenario


def wire_s(scenario: Scenario) -> float:
    """Seconds that a step's bytes take on the busiest link, as payload may use it.

    ring                       2(n-1)M / (nB) (Patarasuk and Yuan, 2009)
    servers on own hosts       max(M, nM/k) / B, each way
    servers beside workers     (n+k-2)M / (kB): a server sends its share to n-1 others, a worker gradients to k-1, which
                               alone a codec makes smaller
    """
    n, k = scenario.workers, scenario.servers
    rate, m = scenario.bandwidth * scenario.transport.efficiency, float(scenario.bytes)
    if n == 1 and not k:
        return 0.0
    if scenario.mode in RING_MODES:
        return 2 * (n - 1) * m * scenario.wire_share / (n * rate) if scenario.workers_per_host < n else 0.0
    if scenario.placement == "dedicated":
        return max(m * min(n, scenario.workers_per_host), n * m / k) / rate
    return (n - 1 + (k - 1) * scenario.wire_share) * m / (k * rate)


def latency_s(scenario: Scenario) -> float:
    """Of a ring's 2(n-1) hops, or of a push and its answer."""
    if scenario.mode in RING_MODES:
        return 2 * (scenario.workers - 1) * scenario.latency_s
    return 2 * scenario.latency_s if scenario.servers else 0.0


def bounds(scenario: Scenario) -> tuple[float, float]:
    """Least and most seconds of a step by these terms alone: all overlaps, or nothing does.

    Nothing overlaps where a server's answers come after all pushes: its bytes go out and in one after the other.
    """
    computing = scenario.computing_s * scenario.slowest
    wire, ways = wire_s(scenario), 2 if scenario.servers else 1
    return max(computing, wire), computing * scenario.slow.random_factor + ways * wire + latency_s(
        scenario
    ) + scenario.optimizer_s
