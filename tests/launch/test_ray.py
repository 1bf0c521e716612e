"""Jobs through Ray itself: one that is started for the job, and one of two nodes, of which one is
lost.
"""

import contextlib
import json
import secrets
import subprocess
import sys
import tempfile

import psutil
import pytest
from helpers.jobs import BIN, ENV, SETTINGS, hvdtrain, kill, read_rows, slow_steps, steps, until
from helpers.launched import TINY, Launched
from helpers.processes import ranks_among

from hvdtrain.base.world.network import free_port
from hvdtrain.launch.on_ray import placed
from hvdtrain.runs.membership_log import membership_file

pytestmark = [pytest.mark.timeout(240), pytest.mark.xdist_group("ray")]
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def test_ranks_are_on_nodes_from_here_whatever_order_bundles_are_in():
    nodes = {0: "b", 1: "a", 2: "b", 3: "c", 4: "b"}
    assert [bundle for bundle, _ in placed(5, 0, nodes, here="a")] == [1, 0, 2, 4, 3]
    made = placed(5, 2, nodes, here="a")
    assert [bundle for bundle, _ in made] == [1, 0, 3, 2, 4]
    assert [
        (place["RANK"], place["LOCAL_RANK"], place["LOCAL_WORLD_SIZE"]) for _, place in made
    ] == [
        ("0", "0", "1"),
        ("1", "0", "3"),
        ("2", "0", "1"),
        ("3", "1", "3"),
        ("4", "2", "3"),
    ]


def test_that_ray_is_missing_is_a_sentence():
    code = "import sys; sys.modules['ray'] = None; from hvdtrain.launch.on_ray import main; main()"
    words = [sys.executable, "-c", code, "--ranks", "1", "--folder", "/", "true"]
    done = subprocess.run(words, **SETTINGS, timeout=60)
    assert (
        done.returncode
        and "Failure: --launcher ray needs Ray, which is not in this"
        in done.stdout.splitlines()[-1]
    )


@pytest.mark.parametrize("version", ["2.51.1"])
def test_a_ray_that_authenticates_nobody_is_refused(version):
    code = f"""
import sys, types
sys.modules['ray'] = types.SimpleNamespace(__version__={version!r})
from hvdtrain.launch.on_ray import main; main()
"""
    words = [sys.executable, "-c", code, "--ranks", "1", "--folder", "/", "true"]
    done = subprocess.run(words, **SETTINGS, timeout=60)
    assert (
        f"Failure: --launcher ray needs Ray 2.52 or later: {version}, which is here"
        in done.stdout.splitlines()[-1]
    )


def ranks(job):
    job.look()
    return ranks_among(job.family, "RANK")


@pytest.mark.hosts
def test_a_ring_goes_on_without_a_worker_on_a_ray_of_its_own_of_which_nothing_is_left(tmp_path):
    out = tmp_path / "run"
    options = [*TINY[:-2], "--mode", "ddp", "--steps", "100", "--batch-size", "30"]
    pace = slow_steps(0.1)  # so that it still trains when one is lost
    with Launched(out, "ray", 3, 0, *options, place=["--elastic"], forked=True, first=pace) as job:
        job.wait_for_steps()
        job.look()
        listening = {address.ip.removeprefix("::ffff:") for address in listeners(job.family)}
        assert listening == {"127.0.0.1"}
        ranks(job)[2].kill()
        printed, _ = job.process.communicate(timeout=120)
        assert job.process.returncode == 0, printed
        until(lambda: not job.alive())
    assert "rank 2 is lost" in printed
    assert json.loads((out / "summary.json").read_text())["lost_workers"] == [2]
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["launch"]["launcher"], manifest["starter"], manifest["workers"]) == (
        "ray",
        "env",
        3,
    )


def listeners(processes):
    """Where the processes listen on TCP."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    yield connection.laddr


@contextlib.contextmanager
def node(log, *words):
    """A node of Ray, as `ray start` makes it; its processes are killed at the end."""
    environment = (
        ENV | TOKEN | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    )
    start = [str(BIN / "ray"), "start", "--block", "--object-store-memory=80000000", *words]
    with log.open("w") as file:
        process = subprocess.Popen(
            start, env=environment, stdout=file, stderr=file, stdin=subprocess.DEVNULL
        )
    try:
        until(lambda: "Ray runtime started" in log.read_text(), 60)
        yield process
    finally:
        lose(process)


def lose(process):
    """End all of a node at once."""
    if process.poll() is None:
        kill([*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)])
        process.wait()


@pytest.mark.main_job
def test_a_worker_whose_node_is_lost_comes_back_on_another(tmp_path):
    """The first server is on the node where the job was launched, which has room for two ranks
    more.
    """
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    head = [
        "--head",
        f"--port={address.split(':')[1]}",
        "--include-dashboard=false",
        "--num-cpus=4",
    ]
    out, options = (
        tmp_path / "run",
        ["--mode", "ps-async", "--wire", "zmq", "--batch-size", "32", *TINY],
    )
    with (
        tempfile.TemporaryDirectory(prefix="ray-") as short,  # for the names of sockets
        node(tmp_path / "head", *head, f"--temp-dir={short}"),
        node(tmp_path / "other", f"--address={address}", "--num-cpus=2") as other,
        Launched(
            out, "ray", 2, 1, *options, place=["--respawn"], env=TOKEN | {"RAY_ADDRESS": address}
        ) as job,
    ):
        until(lambda: all((out / f"metrics.rank{rank}.jsonl").is_file() for rank in (1, 2)), 90)
        lose(other)
        lives = until(lambda: [line for line in read(out) if line["incarnation"] == 2], 90)
        lost = {life["rank"] for life in read(out) if life["why"]}
        assert {life["rank"] for life in lives} <= lost < {1, 2}
        back = lives[0]["rank"]
        taken = len(steps(out, back))
        until(lambda: len(steps(out, back)) > taken + 2, 60)
        stopped = hvdtrain("stop", out)
        printed, _ = job.process.communicate(timeout=60)
        assert stopped.returncode == 0 and job.process.returncode == 143, printed
        assert f"[{back}]<stdout>: hvdtrain: rank {back} has joined" in printed
        assert list((out / "snapshots").glob("step-*")) and not (out / "join.json").exists()


def read(out):
    return read_rows(membership_file(out))
