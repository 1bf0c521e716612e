"""Locks hold where a file system refuses flock as well, and those of processes that have ended do not."""

import errno
import os
import subprocess
import sys
import time

import pytest
from helpers.jobs import JOB, hvdtrain

from hvdtrain.config.run_config import RunConfig
from hvdtrain.data.storage import locked
from hvdtrain.errors import UsageError
from hvdtrain.runs import folder as folders
from hvdtrain.world import locks

REFUSING = """
import errno, fcntl, os
def refuse(*arguments):
    raise OSError(errno.{name}, os.strerror(errno.{name}))
fcntl.flock = refuse
"""
HOLDING = """
import sys, time
from pathlib import Path
from hvdtrain.world import locks
{refusing}
file = open(sys.argv[1], "w")
locks.lock(file.fileno(), Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture(params=["ENOSYS", "EOPNOTSUPP", "ENOLCK"])
def refused(request, monkeypatch):
    number = getattr(errno, request.param)

    def refuse(*arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    yield
    locks.unlock_all()


def test_a_run_folder_is_claimed_once_without_flock(refused, tmp_path):
    run, config = tmp_path / "run", RunConfig(mode="single", epochs=1)
    folders.claim(run, config, 1, "job", False, resuming=False)
    assert folders.is_claimed(run)
    for resuming in (True, False):
        with pytest.raises(UsageError, match="is in use|holds a run"):
            folders.claim(run, config, 1, "job", False, resuming)
    locks.unlock_all()
    assert not folders.is_claimed(run)
    folders.claim(run, config, 1, "job", False, resuming=True)


def test_what_one_makes_the_others_wait_for_without_flock(refused, tmp_path):
    with locked(tmp_path / "out"):
        file = os.open(tmp_path / ".out.hvdtrain-lock", os.O_RDWR)
        with pytest.raises(BlockingIOError):
            locks.lock(file, tmp_path / ".out.hvdtrain-lock")
        os.close(file)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("refusing", ["", REFUSING.format(name="ENOSYS")], ids=["flock", "no flock"])
def test_the_lock_of_a_process_that_was_killed_is_free(refusing, monkeypatch, tmp_path):
    if refusing:
        exec(refusing.replace("fcntl.flock = refuse", ""), scope := {})
        monkeypatch.setattr(locks.fcntl, "flock", scope["refuse"])
    path, words = tmp_path / "file", [sys.executable, "-c", HOLDING.format(refusing=refusing)]
    with subprocess.Popen([*words, path], stdout=subprocess.PIPE, text=True) as holder, path.open("w") as file:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(BlockingIOError):
            locks.lock(file.fileno(), path)
        holder.kill()
        holder.wait()
        locks.lock(file.fileno(), path)
    locks.unlock_all()


def test_a_holder_on_another_host_is_gone_when_it_was_silent_for_long(refused, tmp_path):
    path = tmp_path / "file"
    link = locks._link(path)
    link.symlink_to("another.1 17 3.5")
    with path.open("w") as file:
        with pytest.raises(BlockingIOError):
            locks.lock(file.fileno(), path)
        long_ago = time.time() - locks.SILENT_S - 1
        os.utime(link, (long_ago, long_ago), follow_symlinks=False)
        locks.lock(file.fileno(), path)
        assert os.readlink(link) == locks._name()


def test_a_job_trains_where_flock_is_refused(tmp_path):
    out = tmp_path / "run"
    done = hvdtrain("train", "--mode", "ddp", *JOB, "--out", out, ranks=2, first=REFUSING.format(name="ENOSYS"))
    assert done.returncode == 0, done.stdout
    assert (out / "summary.json").is_file()
    assert list(out.glob(".*hvdtrain-held")) == []
