"""What a job with servers takes at least, in closed form: most jobs of a search need no simulation."""

import math

from hvdtrain.planning.scenario import Scenario

# A simulation of a few steps may be so many times as fast as the closed form.
MARGIN = 1.15


def least_step_s(job: Scenario) -> float:
    """Returns a lower bound of the seconds of a simulated step; 0 if none is known.

    A worker computes, and sends and receives one message after the other. The links of the servers'
    hosts carry all messages that do not stay on a host. These hosts' cores receive all pushes and
    send all answers. What workers on these hosts do counts too, if they take as many steps as others.
    """
    if not job.servers or job.round_steps:
        return 0.0
    is_shared = job.placement == "shared"
    hosts = min(job.servers, job.hosts_with_workers) if is_shared else job.servers
    workers_there = 0
    if is_shared and (job.in_lockstep or hosts == job.hosts_with_workers):
        workers_there = min(job.workers, hosts * job.workers_per_host)
    computing_s = job.computing_s * math.exp(-job.jitter)
    worker_s, server_s = _processor_s(job)
    exchange_s = max(worker_s, _link_s(job, hosts, workers_there))
    server_threads = min(job.servers, hosts * job.cores)
    exchange_s = max(exchange_s, job.workers * server_s / server_threads)
    cores_s = job.workers * server_s + workers_there * worker_s
    cores_s /= job.local_steps
    if job.on_processor:
        cores_s += workers_there * job.threads * computing_s
    least_s = max(computing_s, exchange_s / job.local_steps, cores_s / (hosts * job.cores))
    return least_s / MARGIN


def _processor_s(job: Scenario) -> tuple[float, float]:
    """Returns the processor seconds of a worker's messages of a step, and those of servers for it.

    They are at least so many, wherever the messages go.
    """
    transport = job.transport
    codec = job.codec
    gigabytes = job.bytes / 1e9
    of_bytes = gigabytes * min(1.0, transport.local_share)
    share = codec.wire_share
    at_worker = share * transport.send_s_per_gb + transport.receive_s_per_gb
    at_server = share * transport.server_receive_s_per_gb + transport.server_send_s_per_gb
    # A push and an answer for each bucket.
    messages_s = 2 * max(job.servers, job.bytes / job.bucket_bytes) * transport.message_us * 1e-6
    worker_s = messages_s + of_bytes * at_worker + gigabytes * codec.encode_ms_per_mb
    server_s = messages_s + of_bytes * at_server + gigabytes * codec.decode_ms_per_mb
    return worker_s, server_s


def _link_s(job: Scenario, hosts: int, workers_there: int) -> float:
    """Returns the seconds in which the links of the servers' hosts carry what leaves these hosts.

    Args:
        hosts: of servers.
        workers_there: workers on these hosts that take as many steps as others.
    """
    if job.placement == "dedicated":
        rate = job.wire_rate
        if job.server_gbit:
            rate *= job.server_gbit / job.bandwidth_gbit
        return job.workers * job.bytes / (hosts * rate)
    # The largest share of the servers that is on a worker's host.
    local = -(-job.servers // job.hosts_with_workers) / job.servers
    answers = job.workers * (1 - local)
    if local == 1 and job.in_lockstep:
        answers = job.workers - workers_there
    pushes = workers_there * (1 - local) * job.codec.wire_share
    return (answers + pushes) * job.bytes / (hosts * job.wire_rate)
