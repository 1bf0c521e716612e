"""Locks hold where a file system refuses flock as well, and those of processes that have ended do
not.
"""

import errno
import fcntl
import os
import subprocess
import sys

import filelock
import pytest
from helpers.jobs import JOB, hvdtrain

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.base.system import locks
from hvdtrain.data.storage import locked
from hvdtrain.runs import folder as folders

REFUSING = """
import errno, fcntl, os
def refuse(*arguments):
    raise OSError(errno.{name}, os.strerror(errno.{name}))
fcntl.flock = refuse
"""
HOLDING = """
import sys, time
from pathlib import Path
from hvdtrain.base.system import locks
{refusing}
locks.lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture(params=["ENOSYS", "EOPNOTSUPP", "ENOLCK"])
def refused(request, monkeypatch):
    number = getattr(errno, request.param)

    def refuse(*arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
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
        with pytest.raises(BlockingIOError):
            locks.lock(tmp_path / ".out.hvdtrain-lock")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "refusing", ["", REFUSING.format(name="ENOSYS")], ids=["flock", "no flock"]
)
def test_the_lock_of_a_process_that_was_killed_is_free(refusing, monkeypatch, tmp_path):
    if refusing:
        exec(refusing.replace("fcntl.flock = refuse", ""), scope := {})
        monkeypatch.setattr(fcntl, "flock", scope["refuse"])
    path, words = tmp_path / "file", [sys.executable, "-c", HOLDING.format(refusing=refusing)]
    with subprocess.Popen([*words, path], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(BlockingIOError):
            locks.lock(path)
        holder.kill()
        holder.wait()
        locks.lock(path)
    locks.unlock_all()


def test_what_says_that_a_holder_on_another_host_has_it_is_named(refused, tmp_path):
    """Whether that process lives cannot be told from here."""
    RunConfig(mode="single").write(tmp_path / folders.CONFIG)
    (marker := tmp_path / ".config.toml.hvdtrain-held").write_text("17\nanother\n")
    with pytest.raises(UsageError, match=f"is at work there; if that has ended, remove {marker}"):
        folders.claim(tmp_path, RunConfig(mode="single"), 1, "job", False, resuming=True)
    marker.unlink()
    folders.claim(tmp_path, RunConfig(mode="single"), 1, "job", False, resuming=True)


@pytest.mark.usefixtures("beside_digits")
def test_a_job_trains_where_flock_is_refused(tmp_path):
    out = tmp_path / "run"
    done = hvdtrain(
        "train", "--mode", "ddp", *JOB, "--out", out, ranks=2, first=REFUSING.format(name="ENOSYS")
    )
    assert done.returncode == 0, done.stdout
    assert (out / "summary.json").is_file()
    assert list(out.glob(".*hvdtrain-held")) == []


@pytest.mark.parametrize("version", ["3.32.7", "4.1.2", "4.2.0"])
def test_a_filelock_that_would_empty_the_locked_file_is_refused(version, monkeypatch, tmp_path):
    file = tmp_path / "config.toml"
    file.write_text("mine")
    monkeypatch.setattr(filelock, "__version__", version)
    with pytest.raises(Failure, match=f"filelock {version} would empty.*filelock>=4.2.1"):
        locks.lock(file)
    assert file.read_text() == "mine"


@pytest.mark.parametrize("version", [filelock.__version__, "4.2.1", "4.10.0", "5.0"])
def test_the_locked_file_keeps_its_content(version, monkeypatch, tmp_path):
    file = tmp_path / "config.toml"
    file.write_text("mine")
    monkeypatch.setattr(filelock, "__version__", version)
    held = locks.lock(file)
    assert file.read_text() == "mine"
    locks.unlock(held)
    assert file.read_text() == "mine"
