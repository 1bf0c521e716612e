"""What a command leaves when its process gets a SIGTERM, as from `timeout` or a batch system, or a
SIGHUP, as from a terminal that is closed.
"""

import contextlib
import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time

import psutil
import pytest

pytestmark = pytest.mark.timeout(90)
SMALL = ["--model", "cnn", "--image-size", "32", "--batch-size", "8"]
COMMANDS = {
    "bench": ["bench", "--op", "pushpull", "--backend", "rpc", "--bytes", "16M", "--repeats", "99"],
    "verify": ["verify", "--modes", "ddp", "-n", "2"],
    "calibrate": ["plan", "calibrate", *SMALL, "--out", "calibration.json"],
}


def wait_for(condition, seconds=60):
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("command_name", "number"),
    [
        ("bench", signal.SIGTERM),
        ("verify", signal.SIGTERM),
        ("calibrate", signal.SIGTERM),
        ("bench", signal.SIGHUP),
    ],
)
def test_a_command_leaves_neither_folders_nor_processes(command_name, number, tmp_path):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    command = subprocess.Popen(
        [sys.executable, "-m", "hvdtrain", *COMMANDS[command_name]],
        cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(temporary)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    process = psutil.Process(command.pid)
    wait_for(lambda: process.children(recursive=True) and any(temporary.glob("hvdtrain-*")))
    time.sleep(0.5)  # Python ignores what a signal's handler raises at the moment of a fork
    started = process.children(recursive=True)
    command.send_signal(number)
    _, said = command.communicate(timeout=30)
    assert command.returncode == 128 + number
    assert "Traceback" not in said
    wait_for(
        lambda: (
            not any(
                child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in started
            )
        )
    )
    assert list(temporary.glob("hvdtrain-*")) == []
    assert not (tmp_path / "calibration.json").exists()


def test_a_terminal_that_is_closed_lets_the_ranks_save(tmp_path):
    """A shell sends SIGHUP then, and writing to the terminal fails."""
    ours, terminal = pty.openpty()
    words = ["launch", "-n", "1", "--out", "run", "--", "--mode", "single", *SMALL]
    words += ["--epochs", "500", "--threads", "1", "--snapshot-every", "never"]
    launch = subprocess.Popen(
        [sys.executable, "-m", "hvdtrain", *words],
        cwd=tmp_path,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(terminal)
    os.set_blocking(ours, False)
    run = tmp_path / "run"

    def is_training():
        with contextlib.suppress(BlockingIOError):
            os.read(ours, 2**16)  # as the terminal's window does
        return any(file.stat().st_size for file in run.glob("metrics.rank*.jsonl"))

    wait_for(is_training)
    os.close(ours)
    assert launch.wait(60) == 143
    assert any((run / "snapshots").iterdir())
