"""Copies of the current folder on hosts, by a real rsync: this machine as the host, so that no ssh
is needed.
"""

import os
import shutil

import pytest

from hvdtrain.base.errors import UsageError
from hvdtrain.launch.copies import MARKER, check_destination, copy_commands, copy_here_to

pytestmark = pytest.mark.timeout(60)
HERE = ["localhost"]
ODD = "a b'c\"d $(touch pwned); `x` \\ *"  # as quoting goes wrong


@pytest.fixture(autouse=True)
def rsync():
    if not shutil.which("rsync"):
        if os.environ.get("HVDTRAIN_TESTBED") == "required":
            pytest.fail("no rsync")
        pytest.skip("no rsync")


def fill(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


@pytest.fixture
def source(tmp_path, monkeypatch):
    """The current folder, which is copied."""
    source = fill(
        tmp_path / f"source {ODD}",
        "a.py",
        "hvdtrain/data/b.py",
        "d/.f",
        ".git/c",
        "runs/d",
        "data/e",
        ".env",
    )
    monkeypatch.chdir(source)
    return source


def names(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("exists", [False, True])
def test_a_new_or_empty_folder_becomes_a_copy(exists, source, tmp_path):
    copied = tmp_path / "made" / ODD
    if exists:
        copied.mkdir(parents=True)
    copy_here_to(HERE, str(copied))
    assert names(copied) == {"a.py", "hvdtrain/data/b.py", "d/.f", MARKER}
    assert str(source) in (copied / MARKER).read_text()
    assert not list(tmp_path.rglob("pwned"))


def test_a_copy_is_brought_up_to_date_and_keeps_what_is_not_copied(source, tmp_path):
    copied = tmp_path / "copy"
    copy_here_to(HERE, str(copied))
    fill(copied, "runs/mine", "data/mine", ".mine", "old.py")
    (source / "a.py").unlink()
    (source / "d" / ".f").write_text("new")
    copy_here_to(HERE, str(copied))
    assert names(copied) == {
        "hvdtrain/data/b.py",
        "d/.f",
        MARKER,
        "runs/mine",
        "data/mine",
        ".mine",
    }
    assert (copied / "d" / ".f").read_text() == "new"


@pytest.mark.parametrize("held", ["thesis.txt", "runs/thesis.txt", ".hidden"])
def test_what_is_not_ours_is_never_touched(held, source, tmp_path):
    precious = fill(tmp_path / "home", held)
    with pytest.raises(
        UsageError, match=f"localhost: {precious} holds files and is no copy that hvdtrain made"
    ):
        copy_here_to(HERE, str(precious))
    assert names(precious) == {held}


def test_a_copy_of_a_copy_is_the_users_and_a_file_is_no_folder(source, tmp_path):
    copied, moved = tmp_path / "copy", tmp_path / "moved"
    copy_here_to(HERE, str(copied))
    shutil.copytree(copied, moved)
    with pytest.raises(UsageError, match="holds files and is no copy"):
        copy_here_to(HERE, str(moved))
    with pytest.raises(UsageError, match=f"localhost: {moved}/a.py is no folder"):
        copy_here_to(HERE, str(moved / "a.py"))


def test_the_folder_itself_is_passed_over(source):
    before = names(source)
    copy_here_to(HERE, str(source))
    assert names(source) == before
    assert copy_commands(HERE, str(source)) == {} != copy_commands(["elsewhere"], str(source))


def test_every_host_that_cannot_be_reached_is_told(source, tmp_path):
    hosts = ["nosuch-1.invalid", *HERE, "nosuch-2.invalid"]
    with pytest.raises(UsageError) as refused:
        copy_here_to(hosts, f"{tmp_path}/copy")
    assert [str(line).split(": ")[0] for line in refused.value.args] == [hosts[0], hosts[2]]


def test_a_target_is_an_absolute_path_which_may_be_the_same_as_here_but_not_in_it(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert check_destination(f"{tmp_path}/") == str(tmp_path)
    assert check_destination(f"{tmp_path}-copy") == f"{tmp_path}-copy"
    for folder in (tmp_path / "inside", tmp_path.parent, "/"):
        with pytest.raises(UsageError, match="inside the other"):
            check_destination(str(folder))
    for folder in ("copy", "~/copy", "", "/a\nb"):
        with pytest.raises(UsageError, match="is not an absolute path such as /tmp/hvdtrain"):
            check_destination(folder)
