"""Files to which lines are appended: whole after a full disk, and after a kill."""

import errno
import io
import os
import subprocess
import sys

import pytest

from hvdtrain.base.system import appending
from hvdtrain.base.system.appending import AppendedFile, whole_lines


class Disk(io.FileIO):
    """A file on a disk that has room for so many bytes."""

    room = 0

    def write(self, content):
        if not Disk.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        fits = bytes(content)[: Disk.room]
        Disk.room -= len(fits)
        return super().write(fits)


@pytest.fixture
def file(tmp_path):
    appended = AppendedFile(tmp_path / "lines")
    appended._file.close()
    appended._file = Disk(tmp_path / "lines", "a")
    yield appended, tmp_path / "lines"
    appended._file.close()


def test_lines_wait_for_room_and_come_whole_and_in_order(file):
    appended, path = file
    for room, written in (
        (4, "one\n"),
        (2, "one\ntw"),
        (0, "one\ntw"),
        (100, "one\ntwo\nthree\nfour\n"),
    ):
        Disk.room = room
        appended.write({4: "one\n", 2: "two\n", 0: "three\n", 100: "four\n"}[room])
        assert path.read_text() == written
    appended.close()
    AppendedFile(path).close()
    assert path.read_text().count("\n") == 4
    AppendedFile(path, anew=True).close()
    assert path.read_text() == ""


def test_what_never_has_room_is_an_error_at_the_end_and_too_much_at_once(file, monkeypatch):
    appended, _ = file
    Disk.room = 0
    appended.write("a line\n")
    monkeypatch.setattr(appending, "MOST_WAITING", 10)
    with pytest.raises(OSError, match="No space left"):
        appended.write("another\n")
    with pytest.raises(OSError, match="No space left"):
        appended.close()


def test_half_a_line_of_a_process_that_was_killed_is_cut_off(tmp_path):
    path = tmp_path / "lines"
    path.write_text("one\ntwo\nthr")
    assert whole_lines(path) == ["one", "two"] and path.read_text() == "one\ntwo\n"
    assert whole_lines(path) == ["one", "two"]


PRINTS = """
import sys
from pathlib import Path
from hvdtrain.base.system.terminal import open_logs
terminal = open_logs(Path(sys.argv[1]), 0)
print("first", file=terminal.out)
sys.stdin.readline()
print("nobody reads this", file=terminal.out)
Path(sys.argv[1], "went-on").touch()
"""


def test_a_line_on_the_terminal_is_one_write_though_output_is_unbuffered():
    """Other ranks write to it too, and theirs must not come between a line and its end."""
    read, write = os.pipe2(os.O_DIRECT)  # what is read at once is what was written at once
    code = "from hvdtrain.base.system.terminal import tell; tell('a line')"
    subprocess.run([sys.executable, "-uc", code], stderr=write, timeout=60, check=True)
    assert os.read(read, 100) == b"hvdtrain: a line\n"
    os.close(read)
    os.close(write)


def test_a_rank_goes_on_whose_terminal_is_gone(tmp_path):
    master, slave = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", PRINTS, tmp_path], stdin=subprocess.PIPE, stdout=slave
    ) as process:
        os.close(slave)
        assert os.read(master, 100) == b"first\r\n"
        os.close(master)
        process.communicate(b"\n", timeout=30)
    assert process.returncode == 0 and (tmp_path / "went-on").exists()


def test_a_rank_goes_on_whose_output_has_no_room(tmp_path):
    with open("/dev/full", "wb") as full:
        subprocess.run(
            [sys.executable, "-c", PRINTS, tmp_path],
            input=b"\n",
            stdout=full,
            timeout=30,
            check=True,
        )
    assert (tmp_path / "went-on").exists()
