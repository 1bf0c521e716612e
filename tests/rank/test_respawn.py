"""Who starts lost ranks of a job again."""

import signal

import psutil
from helpers.jobs import until
from helpers.processes import run_python

# A line that two processes print into one pipe is one write, or the other's may lie between its end
# and its newline: `print` makes two where PYTHONUNBUFFERED is set.
FORKS_ONE = """
import os, signal, sys, time
from pathlib import Path
from hvdtrain.job.rank.respawn import Respawner

def stay():
    os.write(1, b"there\\n")
    time.sleep(60)

signal.signal = lambda *arguments: None  # as a worker that is asked to leave, and waits for a server that hangs
forked = Respawner(Path(sys.argv[0]))._fork(stay)
os.write(1, f"{forked}\\n".encode())
time.sleep(60)
"""


def test_nobody_whom_it_started_outlives_it():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        respawner = run_python(FORKS_ONE)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        said = {respawner.stdout.readline().strip() for _ in range(2)}
        [fork] = said - {"there"}
        assert psutil.pid_exists(int(fork))
    finally:
        respawner.kill()
        respawner.wait()
        respawner.stdout.close()
    until(lambda: not psutil.pid_exists(int(fork)))
