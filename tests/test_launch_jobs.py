"""Jobs that `hvdtrain launch` starts on this machine: what they open, how they end, and that nothing is left."""

import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from test_jobs import ENV, HVDTRAIN, SETTINGS, kill, make_images, steps, until

from hvdtrain.orphan import runs

pytestmark = pytest.mark.timeout(120)
TINY = ["--width", "0.0625", "--threads", "1", "--epochs", "1000"]
TOKEN = "s3cret-t0ken-of-a-user"
PLACES = {"local": [], "ssh": ["-H", "localhost:3"], "mpi": ["-H", "localhost:3"]}


def command_line(pid):
    """What a process was started as; nothing, once it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


class Launched:
    """A job that goes on until it is ended; whatever is left of it when the block ends is killed."""

    def __init__(self, out, launcher, workers, servers, *options, env=None, place=None):
        place = PLACES[launcher] if place is None else place
        words = ["launch", "--launcher", launcher, "-n", workers, "-s", servers, *place, "--out", out, "--"]
        self.out, self.first = out, servers
        self.process = subprocess.Popen(
            [HVDTRAIN, *map(str, [*words, *options])], **SETTINGS | {"env": ENV | (env or {})}, start_new_session=True
        )
        self.family = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.look()
        kill(self.family)
        self.process.kill()  # nothing, where it has ended
        self.process.communicate()

    def look(self):
        if self.process.poll() is None:
            self.family = list({*self.family, *psutil.Process(self.process.pid).children(recursive=True)})

    def wait_for_steps(self, count=3):
        until(
            lambda: (
                (self.out / f"metrics.rank{self.first}.jsonl").is_file() and len(steps(self.out, self.first)) > count
            )
        )
        self.look()

    def ranks(self):
        """{the rank that its starter gave it: process}"""
        found = {}
        for process in self.family:
            try:
                env, words, name = process.environ(), process.cmdline(), process.name()
            except psutil.Error:
                continue
            number = env.get("OMPI_COMM_WORLD_RANK", env.get("HOROVOD_RANK"))
            if number is not None and "hvdtrain" in words and name.startswith("python"):
                found[int(number)] = process
        return found

    def alive(self):
        return [p for p in self.family if runs(p)]


@pytest.mark.parametrize(("mode", "workers", "servers"), [("allreduce", 2, 0), ("ddp", 2, 0), ("ps-async", 2, 1)])
def test_ranks_of_a_local_job_listen_on_loopback_only(mode, workers, servers, tmp_path):
    with Launched(tmp_path / "run", "local", workers, servers, "--mode", mode, *TINY) as job:
        job.wait_for_steps()
        ranks = job.ranks()
        assert sorted(ranks) == list(range(workers + servers))
        listening = {
            connection.laddr.ip
            for rank in ranks.values()
            for connection in rank.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
            or (connection.type.name == "SOCK_DGRAM" and not connection.raddr)
        }
    assert listening <= {"127.0.0.1", "::1"}
    assert listening or mode == "allreduce"  # whose ranks meet in shared memory


@pytest.mark.parametrize(
    ("launcher", "signals"),
    [(launcher, [signal.SIGINT, signal.SIGINT]) for launcher in PLACES] + [("local", [signal.SIGTERM])],
)
def test_nothing_is_left_of_a_job_that_is_ended(launcher, signals, tmp_path):
    with Launched(tmp_path / "run", launcher, 2, 1, "--mode", "ps-sync", *TINY) as job:
        job.wait_for_steps()
        assert len(job.ranks()) == 3
        for number in signals:
            job.process.send_signal(number)
            time.sleep(0.4)
        assert job.process.wait(timeout=30) == 128 + signals[0]
        until(lambda: not job.alive(), 15)


@pytest.mark.parametrize("launcher", PLACES)
def test_a_killed_rank_is_named_and_its_end_is_the_jobs_exit_code(launcher, tmp_path):
    with Launched(tmp_path / "run", launcher, 2, 0, "--mode", "allreduce", *TINY) as job:
        job.wait_for_steps()
        job.ranks()[1].send_signal(signal.SIGKILL)
        printed, _ = job.process.communicate(timeout=40)
        until(lambda: not job.alive(), 15)
    code, last = job.process.returncode, printed.splitlines()[-1]
    if (
        launcher == "ssh" and "the job failed: rank 0 failed" in last
    ):  # who lost its peer was faster to end than horovodrun to look
        assert code == 1, printed
    else:
        assert code == 128 + signal.SIGKILL, printed
        assert "hvdtrain: the job failed: rank 1 was ended by SIGKILL" in last


def test_a_rank_that_raises_is_named_with_its_last_lines(tmp_path):
    make_images(tmp_path / "data", train=8, validation=8, side=32)
    (tmp_path / "data" / "TrainData" / "b" / "5.png").write_bytes(b"not an image")
    options = ["--mode", "allreduce", "--batch-size", "4", "--dataset", tmp_path / "data"]
    with Launched(tmp_path / "run", "local", 2, 0, *options, *TINY) as job:
        printed, _ = job.process.communicate(timeout=60)
        assert job.process.returncode == 1
    lines = printed.splitlines()
    rank = re.fullmatch(r"hvdtrain: the job failed: rank (\d) failed: .*5\.png.*", lines[-1])[1]
    [at] = [n for n, line in enumerate(lines) if line.startswith(f"the last lines of rank {rank}, in {tmp_path}")]
    assert lines[at + 1].startswith("    ") and "5.png" in lines[-2]
    assert [line for line in lines[:at] if re.fullmatch(rf"\[{rank}\]<stderr>: hvdtrain: rank {rank} failed: .*", line)]


@pytest.mark.parametrize("launcher", ["ssh", "mpi"])
def test_a_token_in_the_environment_is_on_no_command_line(launcher, tmp_path):
    env = {"AWS_SECRET_ACCESS_KEY": TOKEN, "HF_TOKEN": TOKEN}
    with Launched(tmp_path / "run", launcher, 2, 0, "--mode", "allreduce", *TINY, env=env) as job:
        job.wait_for_steps()
        lines = [command_line(process.pid) for process in [job.process, *job.family]]
        assert len(lines) > 3
        assert not [line for line in lines if TOKEN in line]
        assert TOKEN.encode() in Path(f"/proc/{job.process.pid}/environ").read_bytes()
