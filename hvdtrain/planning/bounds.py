"""What a job with servers takes at least, in closed form: most jobs of a search need no simulation."""

import math

from hvdtrain.planning.scenario import Scenario

# A simulation of a few steps may be so many times as fast as the closed form.
MARGIN = 1.25


def least_step_s(job: Scenario) -> float:
    """Returns the seconds that no simulated step of a job is shorter than; 0 where that is not known.

    A worker computes, and sends and receives one message after the other. The links of the servers'
    hosts carry all answers that do not stay on a host. The servers' cores receive all pushes and send
    all answers.
    """
    if not job.servers or job.round_steps:
        return 0.0
    transport = job.transport
    hosts = job.servers
    rate = job.wire_rate
    # The largest share of the servers that is on a worker's host.
    local = 0.0
    if job.placement == "shared":
        hosts = min(job.servers, job.hosts_with_workers)
        local = -(-job.servers // job.hosts_with_workers) / job.servers
    elif job.server_gbit:
        rate *= job.server_gbit / job.bandwidth_gbit
    # The workers whose answers cross a link. Where nobody waits, the others may take all steps.
    remote = float(job.workers)
    if local == 1:
        remote = job.workers - job.workers_per_host if job.in_lockstep else 0.0
        local = 0.0
    link_s = remote * (1 - local) * job.bytes / (hosts * rate)
    # A gigabyte of weights costs the processors at least so much, wherever it goes.
    gigabytes = job.bytes / 1e9 * min(1.0, transport.local_share)
    share = job.codec.wire_share
    worker_s = gigabytes * (share * transport.send_s_per_gb + transport.receive_s_per_gb)
    server_s = gigabytes * (share * transport.server_receive_s_per_gb)
    server_s += gigabytes * transport.server_send_s_per_gb
    servers_s = job.workers * server_s / min(job.servers, hosts * job.cores)
    exchange_s = max(worker_s, servers_s, link_s) / job.local_steps
    computing_s = job.computing_s * math.exp(-job.jitter)
    return max(computing_s, exchange_s) / MARGIN
