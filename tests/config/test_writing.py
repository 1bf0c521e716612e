"""What is written in place of something: that is there until all of the new is, and nothing else is
left behind.
"""

import contextlib
import json
import os
import re
import resource
import stat
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers.packed_sets import contents, pack
from planning.test_calibration import make

import hvdtrain
from hvdtrain.base.config.option_types import FileToWrite
from hvdtrain.base.config.writing import replacing, write_whole
from hvdtrain.base.errors import UsageError
from hvdtrain.data.find import find_dataset
from hvdtrain.data.storage import atomic_folder
from hvdtrain.planning.command import plan


@contextlib.contextmanager
def little_room(most):
    """No file may have more bytes, as on a disk that is full; and of modules no half is kept."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    kept = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        sys.dont_write_bytecode = kept
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_where_writing_fails_the_old_file_is_as_it_was(tmp_path):
    file = tmp_path / "a.json"
    file.write_text("old")
    with little_room(1000), pytest.raises(OSError, match="File too large"):
        write_whole(file, "x" * 2000)
    with pytest.raises(KeyError), replacing(file) as part:
        part.write_text("half")
        raise KeyError
    assert file.read_text() == "old" and os.listdir(tmp_path) == ["a.json"]
    write_whole(file, "new")
    assert file.read_text() == "new" and os.listdir(tmp_path) == ["a.json"]


def test_a_file_keeps_its_mode_and_a_link_in_its_way_leads_nowhere(tmp_path):
    secret, mine = tmp_path / "secret", tmp_path / "mine"
    write_whole(secret, "s", mode=0o600)
    write_whole(secret, "t")
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    mine.write_text("mine")
    (tmp_path / ".part-secret").symlink_to(mine)
    secret.unlink()
    secret.symlink_to(mine)
    write_whole(secret, "u")
    assert (mine.read_text(), secret.read_text(), secret.is_symlink()) == ("mine", "u", False)


def test_a_pipe_is_written_to(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reading = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_whole(tmp_path / "pipe", "x")
    assert os.read(reading, 9) == b"x" and stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    os.close(reading)


def test_a_failed_json_leaves_the_one_before(tmp_path):
    calibration, file = tmp_path / "cal.json", tmp_path / "rows.json"
    make().save(calibration)
    file.write_text("{}")
    (tmp_path / "link").symlink_to(file)
    asked = "--modes allreduce,ps-sync --workers 2 --servers 1 --bandwidth 1gbit"
    words = ["predict", str(calibration), *asked.split(), "--json"]
    done = CliRunner().invoke(plan, [*words, str(tmp_path / "link")])
    assert done.exit_code == 0, done.output
    written = file.read_text()
    assert "rows" in json.loads(written) and (tmp_path / "link").is_symlink()
    with little_room(100):
        failed = CliRunner().invoke(plan, [*words, str(file)])
    assert isinstance(failed.exception, OSError), failed.output
    assert file.read_text() == written
    assert sorted(os.listdir(tmp_path)) == ["cal.json", "link", "rows.json"]


@pytest.mark.parametrize(
    ("content", "is_replaced"),
    [(b"", True), (b' {"rows": []}', True), (b"<svg/>", True), (b"import torch\n", False)],
)
def test_a_file_of_another_kind_is_not_replaced(tmp_path, content, is_replaced):
    """As where a user names a script for --json."""
    file = tmp_path / "file"
    file.write_bytes(content)
    if is_replaced:
        assert FileToWrite().convert(str(file), None, None) == file
        return
    with pytest.raises(UsageError, match="is a file of another kind"):
        FileToWrite().convert(str(file), None, None)


def test_a_file_that_cannot_be_written_is_refused_before_the_work():
    words = "^/sys/rows.json cannot be written: .*; choose another folder$"
    with pytest.raises(UsageError, match=words):
        FileToWrite().convert("/sys/rows.json", None, None)


def test_what_is_written_as_it_comes_needs_no_folder():
    assert FileToWrite().convert("/dev/null", None, None) == Path("/dev/null")


def test_what_a_killed_process_had_moved_aside_comes_back(tmp_path):
    """It was killed between two renames."""
    (tmp_path / ".out.hvdtrain-replaced").mkdir()
    (tmp_path / ".out.hvdtrain-replaced" / "old").touch()
    with pytest.raises(KeyError), atomic_folder(tmp_path / "out"):
        raise KeyError
    assert (tmp_path / "out" / "old").exists() and os.listdir(tmp_path) == ["out"]


def test_where_packing_anew_fails_the_old_set_is_as_it_was(small, packed, tmp_path):
    before = contents(find_dataset(str(packed)).train)
    files = sorted(path.name for path in (packed / "data").iterdir())
    with little_room(5_000), pytest.raises(UsageError, match="File too large"):
        pack(small, packed, force=True)
    assert sorted(path.name for path in (packed / "data").iterdir()) == files
    assert contents(find_dataset(str(packed)).train) == before


@pytest.fixture
def packed(few_digits, tmp_path):
    pack(few_digits, tmp_path / "packed")
    return tmp_path / "packed"


# Who writes files otherwise: into a folder that appears whole (data.build, reporting,
# tools.evaluate.files, job.recording.snapshot), with a name of its own each time, what nobody else has put there, or a
# record that is locked while it is replaced.
OTHERWISE = {
    "base/config/writing.py",
    "data/build.py",
    "tools/evaluate/files.py",
    "job/recording/snapshot.py",
    "reporting/__init__.py",
    "data/download.py",
    "data/storage.py",
    "data/packing.py",
    "launch/testbed.py",
    "launch/private_network.py",
    "base/system/appending.py",
    "job/recording/trace_file.py",
    "launch/processes.py",
    "launch/forking.py",
    "launch/records.py",
}
WRITES = re.compile(r"\.write_text\(|\.write_bytes\(|open\([^)]*\"[wx]b?\"|savefig\((?!file)")


def test_all_else_is_written_by_one_function():
    root = Path(hvdtrain.__file__).parent
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if WRITES.search(path.read_text())
    }
    assert found <= OTHERWISE, found - OTHERWISE
