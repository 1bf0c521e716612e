"""Copies of code and data on hosts, by a real rsync: this machine as the host, so that no ssh is needed."""

import os
import shutil
from pathlib import Path

import pytest

from hvdtrain.config.run_config import RunConfig
from hvdtrain.errors import UsageError
from hvdtrain.launch.copies import CODE_OPTIONS, DATA_OPTIONS, MARKER, Copy, check_destination, data_folder

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


def names(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("called", ["copy", ODD])
@pytest.mark.parametrize("exists", [False, True])
def test_a_new_or_empty_folder_becomes_a_copy(called, exists, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = fill(tmp_path / f"source {called}", "a.py", "hvdtrain/data/b.py", "d/.f")
    fill(source, ".git/c", "runs/d", "data/e", ".env")
    copied = tmp_path / "made" / called
    if exists:
        copied.mkdir(parents=True)
    Copy(source, str(copied), CODE_OPTIONS).make(HERE)
    assert names(copied) == {"a.py", "hvdtrain/data/b.py", "d/.f", MARKER}
    assert str(source) in (copied / MARKER).read_text()
    assert not list(tmp_path.rglob("pwned"))


def test_a_copy_is_brought_up_to_date_and_keeps_what_is_not_copied(tmp_path):
    source, copied = fill(tmp_path / "source", "a.py", "b.py"), tmp_path / "copy"
    copy = Copy(source, str(copied), CODE_OPTIONS)
    copy.make(HERE)
    fill(copied, "runs/mine", "data/mine", ".mine", "old.py")
    (source / "a.py").unlink()
    (source / "b.py").write_text("new")
    copy.make(HERE)
    assert names(copied) == {"b.py", MARKER, "runs/mine", "data/mine", ".mine"}
    assert (copied / "b.py").read_text() == "new"


@pytest.mark.parametrize("held", ["thesis.txt", "runs/thesis.txt", ".hidden"])
def test_what_is_not_ours_is_never_touched(held, tmp_path):
    source, precious = fill(tmp_path / "source", "a.py"), fill(tmp_path / "home", held)
    with pytest.raises(UsageError, match=f"localhost: {precious} holds files and is no copy that hvdtrain made"):
        Copy(source, str(precious), CODE_OPTIONS).make(HERE)
    assert names(precious) == {held}


def test_a_copy_of_a_copy_is_somebodys_own(tmp_path):
    source, copied, own = fill(tmp_path / "source", "a.py"), tmp_path / "copy", tmp_path / "own"
    Copy(source, str(copied), CODE_OPTIONS).make(HERE)
    shutil.copytree(copied, own)
    fill(own, "thesis.txt")
    with pytest.raises(UsageError, match="holds files and is no copy"):
        Copy(source, str(own), CODE_OPTIONS).make(HERE)
    assert (own / "thesis.txt").exists()


def test_data_in_a_copy_that_somebody_put_there_is_not_touched(tmp_path):
    code, data, copied = fill(tmp_path / "code", "a.py"), fill(tmp_path / "images", "x.png"), tmp_path / "copy"
    Copy(code, str(copied), CODE_OPTIONS).make(HERE)
    fill(copied, "data/mine.png")
    with pytest.raises(UsageError, match="holds files and is no copy"):
        Copy(data, f"{copied}/data", DATA_OPTIONS).make(HERE)
    assert names(copied / "data") == {"mine.png"}


def test_linked_images_are_copied_as_images(tmp_path):
    elsewhere, data = fill(tmp_path / "elsewhere", "x.png"), tmp_path / "images"
    data.mkdir()
    (data / "x.png").symlink_to(elsewhere / "x.png")
    Copy(data, f"{tmp_path}/copy/data", DATA_OPTIONS).make(HERE)
    made = tmp_path / "copy" / "data" / "x.png"
    assert made.read_text() == "x.png" and not made.is_symlink()


def test_a_file_is_no_folder_to_copy_to(tmp_path):
    source = fill(tmp_path / "source", "a.py")
    file = fill(tmp_path, "file") / "file"
    with pytest.raises(UsageError, match=f"localhost: {file} is no folder"):
        Copy(source, str(file), CODE_OPTIONS).make(HERE)
    assert file.read_text() == "file"


def test_the_folder_itself_is_passed_over(tmp_path):
    source = fill(tmp_path / "source", "a.py")
    copy = Copy(source, str(source), CODE_OPTIONS)
    copy.make(HERE)
    assert names(source) == {"a.py"}
    assert copy.shell_commands(HERE) == [] and len(copy.shell_commands(["elsewhere"])) == 2


def test_every_host_that_cannot_be_reached_is_told(tmp_path):
    hosts = ["nosuch-1.invalid", *HERE, "nosuch-2.invalid"]
    with pytest.raises(UsageError) as refused:
        Copy(fill(tmp_path / "source", "a.py"), f"{tmp_path}/copy", CODE_OPTIONS).make(hosts)
    assert [str(line).split(": ")[0] for line in refused.value.args] == [hosts[0], hosts[2]]


@pytest.mark.parametrize("folder", ["copy", "~/copy", "", "/a\nb", "/"])
def test_a_target_is_an_absolute_path_beside_what_is_copied(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="--sync-dst-dir"):
        check_destination(folder)


def test_a_target_may_be_the_same_path_as_here_but_not_in_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert check_destination(f"{tmp_path}/") == str(tmp_path)
    assert check_destination(f"{tmp_path}-copy") == f"{tmp_path}-copy"
    for folder in (tmp_path / "inside", tmp_path.parent):
        with pytest.raises(UsageError, match="lie one in the other"):
            check_destination(str(folder))


@pytest.mark.parametrize(
    ("dataset", "says"),
    [
        ("digits", "digits is a name, which every host builds itself"),
        ("s3://bucket/coil", "is a URL, which every host reads itself"),
        ("/no/such/folder", "there is no folder /no/such/folder"),
    ],
)
def test_only_a_folder_of_images_is_copied(dataset, says):
    with pytest.raises(UsageError, match=says):
        data_folder(RunConfig(dataset=dataset))


def test_a_folder_of_images_is_found_from_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert data_folder(RunConfig(dataset=str(fill(Path("images"), "x.png")))) == tmp_path / "images"
