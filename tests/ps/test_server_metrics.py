"""What a server counts, driven with plain calls, and what it writes down."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from helpers import buckets
from torch.futures import Future

from hvdtrain.ps.server_metrics import ServerMetrics, server_metrics_file
from hvdtrain.wire.messages import Answer


def make_server(policy, workers=2):
    server = buckets.make_desk(lambda: policy(workers), workers)
    for bucket in (0, 1):
        server.install(bucket, torch.zeros(2))
    return server


def push(worker, step):
    return buckets.push(worker, step, [1.0, 1.0])._replace(gradient=[torch.ones(2)])


def counted(server):
    row = server.load.row()
    return {name: row[name] for name in ("pushes", "queue", "waiting", "bytes_received", "bytes_sent")}


def test_a_held_push_is_in_the_queue_and_its_worker_waits_until_all_have_pushed():
    server = make_server(buckets.sync)
    for bucket in (0, 1):
        assert isinstance(server.push(bucket, push(0, 1)), Future)
    assert counted(server) == {"pushes": 2, "queue": 2, "waiting": 1, "bytes_received": 16, "bytes_sent": 0}
    assert server.load.row()["applying_s"] == 0
    for bucket in (0, 1):
        assert isinstance(server.push(bucket, push(1, 1)), Answer)
    assert counted(server) == {"pushes": 4, "queue": 0, "waiting": 0, "bytes_received": 32, "bytes_sent": 32}
    assert server.load.row()["applying_s"] > 0
    server.calls["pull"](0, 0)
    assert counted(server)["bytes_sent"] == 40


def test_a_push_waits_in_a_queue_while_another_is_at_the_bucket_and_not_while_it_is_held():
    server = make_server(buckets.sync)
    held = server.push(0, push(0, 1))
    with ThreadPoolExecutor() as pool:
        with server._locks[server.buckets[0]]:
            answered = pool.submit(server.push, 0, push(1, 1))
            time.sleep(0.05)
            assert not held.done() and server.load.row()["queued_s"] == 0
        answered.result()
    assert held.done() and 0.04 < server.load.row()["queued_s"] < 10


def test_lines_are_appended_and_the_last_one_has_all(tmp_path):
    for _ in range(2):
        server = make_server(buckets.asynchronous)
        metrics = ServerMetrics(tmp_path, 0, server.load)
        server.push(0, push(0, 1))
        metrics.stop()
    lines = [json.loads(line) for line in server_metrics_file(tmp_path, 0).read_text().splitlines()]
    assert len(lines) >= 4 and lines[-1]["pushes"] == 1
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
    assert all(line["cpu_s"] > 0 and line["rss_mb"] > 0 for line in lines)
