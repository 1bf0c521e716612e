"""Jobs that `hvdtrain launch` started."""

import subprocess
from pathlib import Path

import psutil

from helpers.fork_proxy import FIRST
from helpers.forked_jobs import forked_hvdtrain
from helpers.jobs import ENV, HVDTRAIN, SETTINGS, kill, steps, until
from helpers.processes import ranks_among
from hvdtrain.base.system.parent import is_alive

TINY = ["--width", "0.0625", "--threads", "1", "--epochs", "1000"]
TOKEN = "s3cret-t0ken-of-a-user"


def command_line(pid):
    """What a process was started as; nothing, once it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


class Launched:
    """A job that goes on until it is ended; whatever is left of it when the block ends is killed.

    Args:
        forked: its ranks are forked; what stands in for them here are proxies: see fork_proxy.py.
        first: Python code that each forked rank runs before all else.
    """

    def __init__(
        self, out, launcher, workers, servers, *options, env=None, place=(), forked=False, first=""
    ):
        words = [
            "launch",
            "--launcher",
            launcher,
            "-n",
            workers,
            "-s",
            servers,
            *place,
            "--out",
            out,
            "--",
        ]
        self.out, self.first = out, servers
        program = forked_hvdtrain() if forked else [HVDTRAIN]
        variables = ENV | {FIRST: first} | (env or {})
        self.process = subprocess.Popen(
            [*program, *map(str, [*words, *options])],
            **SETTINGS | {"env": variables},
            start_new_session=True,
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
            self.family = list(
                {*self.family, *psutil.Process(self.process.pid).children(recursive=True)}
            )

    def wait_for_steps(self, count=3):
        until(
            lambda: (
                (self.out / f"metrics.rank{self.first}.jsonl").is_file()
                and len(steps(self.out, self.first)) > count
            )
        )
        self.look()

    def ranks(self):
        """{the rank that its starter gave it: process}"""
        return ranks_among(self.family, "OMPI_COMM_WORLD_RANK", "HOROVOD_RANK")

    def alive(self):
        return [p for p in self.family if is_alive(p)]
