"""What `hvdtrain doctor` says of an environment that is whole, and of ones that are broken for
real.
"""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import filelock
import pytest

from hvdtrain.base.config import recipes
from hvdtrain.tools.doctor import machine, software
from hvdtrain.tools.doctor.command import CHECKS
from hvdtrain.tools.doctor.findings import MISSING, OK, WARNING

BUILD = Path(__file__).parents[2] / "launchers" / "horovod-build"


def run(*arguments, python=sys.executable, cwd=None, **environment):
    # Not from the checkout, where `-m` would find this very package first.
    command = [str(python), "-m", "hvdtrain", "doctor", *arguments]
    env = os.environ | environment
    return subprocess.run(
        command, env=env, cwd=cwd or Path(python).parent, capture_output=True, text=True
    )


def rows(process):
    found = {row["check"]: row for row in json.loads(process.stdout)}
    assert list(found)[: len(CHECKS)] == [check.name for check in CHECKS]
    for row in found.values():
        assert list(row) == ["check", "needed", "status", "found", "advice"]
        assert bool(row["advice"]) == (row["status"] != OK)
        assert "\n" not in row["advice"]
    return found


def missing(found):
    return {name for name, row in found.items() if row["status"] == MISSING}


def optional(found):
    """What this machine lacks, without which a comparison can run."""
    return {name for name in missing(found) if not found[name]["needed"]}


@pytest.fixture
def environment(tmp_path):
    """A copy of this environment made of links, and a function that takes something out of it."""
    prefix, copy = Path(sys.prefix), tmp_path / "environment"
    packages = Path(sysconfig.get_path("purelib")).relative_to(prefix)
    for folder in (Path("bin"), packages):
        (copy / folder).mkdir(parents=True)
        for file in (prefix / folder).iterdir():
            (copy / folder / file.name).symlink_to(file)
    shutil.copy(prefix / "pyvenv.cfg", copy)
    return copy / "bin", copy / packages


# ---- A whole environment


def test_here_a_comparison_can_run_and_json_has_the_rows(tmp_path):
    process = run("--json", HVDTRAIN_CACHE=str(tmp_path / "not" / "there"))
    found = rows(process)
    assert process.returncode == 0 and process.stderr == ""
    assert not [name for name in missing(found) if found[name]["needed"]]
    assert found["torch"]["found"] == importlib.metadata.version("torch")
    assert (found["Horovod: MPI"]["status"], found["Horovod: MPI"]["found"]) == (OK, "yes")
    assert found["horovod"]["found"] == importlib.metadata.version("horovod")
    assert found["mpirun"]["found"] == str(Path(sys.executable).with_name("mpirun"))
    assert found["two processes"]["found"].startswith("started and ended in")
    assert list(tmp_path.iterdir()) == []  # it looked, and left nothing


# ---- Broken ones


def test_an_environment_without_torch_and_starters(environment, tmp_path):
    programs, packages = environment
    for name in ("mpirun", "horovodrun"):
        (programs / name).unlink()
    for file in [packages / "torch", *packages.glob("torch-*")]:
        file.unlink()
    process = run(
        "--json", "--launcher", "yarn", python=programs / "python", PATH=str(tmp_path), CXX=""
    )
    found = rows(process)
    assert process.returncode == 1
    needed = [
        "torch",
        "torch loads",
        "Horovod loads",
        "Horovod: MPI",
        "mpirun",
        "two processes",
        "yarn",
    ]
    assert process.stderr.strip().endswith(f"until this is fixed: {', '.join(needed)}")
    others = {"Horovod: Gloo", "Horovod: NCCL", "horovodrun", "C++ compiler, make", "GPUs"}
    assert missing(found) == {*needed, *others}
    assert found["torch"]["advice"].startswith("`uv sync` installs torch 2.")
    assert "No module named 'torch'" in found["torch loads"]["found"]
    assert found["mpirun"]["found"] == f"no {programs / 'mpirun'}"
    assert found["two processes"]["found"] == "mpirun cannot be started"


@pytest.mark.parametrize(
    ("size", "words"), [(0, "ImportError: "), (100_000, "the process is ended by SIG")]
)
def test_a_horovod_that_does_not_load(environment, size, words):
    programs, packages = environment
    horovod = packages / "horovod"
    whole = horovod.resolve()
    horovod.unlink()
    for folder in (horovod, horovod / "torch"):
        folder.mkdir()
        for file in (whole / folder.relative_to(horovod)).iterdir():
            if file.name != "torch":
                (folder / file.name).symlink_to(file)
    library = next((horovod / "torch").glob("mpi_lib_v2*"))
    start = library.read_bytes()[:size]
    library.unlink()
    library.write_bytes(start)
    process = run("--json", python=programs / "python")
    found = rows(process)
    assert process.returncode == 1
    assert missing(found) == {"Horovod loads", "Horovod: Gloo", "Horovod: MPI", "Horovod: NCCL"}
    assert words in found["Horovod loads"]["found"]
    assert "uv sync --reinstall-package horovod" in found["Horovod loads"]["advice"]
    assert found["torch loads"]["status"] == OK


def test_libraries_that_are_older_than_required_or_not_there(environment):
    programs, packages = environment
    for name in ("filelock", "tensorboard"):
        for folder in packages.glob(f"{name}-*.dist-info"):
            folder.unlink()
    older = packages / "filelock-4.2.0.dist-info"
    older.mkdir()
    (older / "METADATA").write_text("Metadata-Version: 2.1\nName: filelock\nVersion: 4.2.0\n")
    (packages / "filelock").unlink()
    shutil.copytree(Path(filelock.__file__).parent, packages / "filelock")
    version = packages / "filelock" / "version.py"
    version.write_text("__version__ = version = '4.2.0'\n")
    process = run("--json", python=programs / "python")
    found = rows(process)
    assert process.returncode == 1
    assert missing(found) == {"other libraries", "file locks"} | optional(found)
    expected = "no tensorboard; filelock 4.2.0, not >=4.2.1"
    assert found["other libraries"]["found"] == expected
    assert found["file locks"]["found"] == "filelock 4.2.0 would empty the files that it locks"
    assert found["file locks"]["advice"] == "`pip install 'filelock>=4.2.1'`"
    assert process.stderr.endswith("until this is fixed: other libraries, file locks\n")


def test_a_check_that_raises_does_not_hide_the_others(tmp_path):
    for name in ("hvdtrain", "datasets", "launchers"):
        shutil.copytree(recipes.RECIPES / name, tmp_path / name)
    (tmp_path / "launchers" / "local.toml").unlink()
    (tmp_path / "file").touch()
    process = run("--json", cwd=tmp_path, HVDTRAIN_CACHE=str(tmp_path / "file"))
    found = rows(process)
    assert process.returncode == 1
    assert missing(found) == {"two processes", "cache"}
    assert found["two processes"]["found"].startswith(
        "cannot be checked: UsageError: unknown launcher 'local'"
    )
    assert found["cache"]["found"] == f"{tmp_path / 'file'} cannot be written: Not a directory"


def test_a_machine_without_shared_memory_and_name(tmp_path):
    namespaces = ["unshare", "--map-root-user", "--net", "--mount", "--uts"]
    setup = f"""mount -t tmpfs -o size=8m tmpfs /dev/shm &&
        {sys.executable} -c "import socket; socket.sethostname('nowhere.invalid')" && """
    if subprocess.run([*namespaces, "sh", "-c", f"{setup} true"], capture_output=True).returncode:
        pytest.skip("namespaces are not allowed here")
    command = [*namespaces, "sh", "-c", f"{setup} exec {sys.executable} -m hvdtrain doctor"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert process.returncode == 1
    assert process.stderr.strip().endswith("until this is fixed: /dev/shm")
    shown = [" ".join(line.split()) for line in process.stdout.splitlines()]
    assert "missing /dev/shm 8 MB, 8 MB free" in shown
    assert [
        line
        for line in shown
        if line.startswith("warning host name nowhere.invalid does not resolve")
    ]


# ---- Single checks


def test_another_program_that_a_shell_would_take(tmp_path, monkeypatch):
    (tmp_path / "mpirun").write_text("#!/bin/sh\n")
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = software.starter("mpirun")
    assert found.status == WARNING
    assert f"{tmp_path / 'mpirun'} comes first in PATH" in found.found


@pytest.mark.parametrize(
    ("own", "files", "cores", "memory"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n", "memory.max": "1000000\n"}, 1.5, 1e6),
        # What is above limits as well: a batch system's job, then one of its steps.
        (
            "0::/job/step\n",
            {"job/cpu.max": "200000 100000", "job/step/cpu.max": "max 100000"},
            2,
            "inf",
        ),
        ("0::/job/step\n", {"job/memory.max": "max", "job/step/memory.max": "5"}, "inf", 5),
        # Seen from within a container: the path is the host's, the top is the container's own.
        ("0::/docker/1\n", {"cpu.max": "50000 100000"}, 0.5, "inf"),
        (
            "3:cpu,cpuacct:/a\n",
            {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
            "inf",
            "inf",
        ),
        (
            "3:cpu:/a\n",
            {"cpu/a/cpu.cfs_quota_us": "300000", "cpu/a/cpu.cfs_period_us": "100000"},
            3,
            "inf",
        ),
        ("2:cpuset:/\n4:memory:/\n0::/\n", {"memory/memory.limit_in_bytes": "7\n"}, "inf", 7),
    ],
)
def test_limits_of_control_groups(tmp_path, own, files, cores, memory):
    root, self = tmp_path / "cgroup", tmp_path / "self"
    self.write_text(own)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    assert machine.cpu_quota(root, self) == float(cores)
    assert machine.memory_limit(root, self) == float(memory)


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("always [madvise] never\n", (OK, "madvise")),
        ("always madvise [never]\n", (WARNING, "never")),
    ],
)
def test_huge_pages(tmp_path, text, finding):
    (tmp_path / "enabled").write_text(text)
    found = machine.huge_pages(tmp_path / "enabled")
    assert (found.status, found.found) == finding


def built(call):
    """What the build of Horovod says before cmake looks."""
    words = [
        sys.executable,
        "-c",
        f"{call}import hvdtrain_horovod_build as build; build.check_tools()",
    ]
    return subprocess.run(
        words, env=os.environ | {"PYTHONPATH": str(BUILD)}, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("tools", "missing"),
    [(["c++", "make"], ""), (["c++"], "make"), ([], "a C++ compiler and make")],
)
def test_what_building_horovod_lacks_is_said(tools, missing, tmp_path, monkeypatch):
    """By doctor, and by the build itself."""
    for tool in tools:
        (tmp_path / tool).write_text("#!/bin/sh\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "")
    monkeypatch.delenv("CMAKE_GENERATOR", raising=False)
    finding = software.compiler()
    assert finding.status == (MISSING if missing else OK) and ("make" in finding.advice) == bool(
        missing
    )
    wanted = (
        f"building Horovod needs {missing}: install build-essential, or g++ and make\n"
        if missing
        else ""
    )
    said = built("")
    assert (said.returncode, said.stderr) == (bool(missing), wanted)


def test_a_python_without_headers_is_told_before_horovod_is_built():
    """As Debian's python3 is, without python3-dev."""
    done = built("import sysconfig; sysconfig.get_path = lambda _: 'nowhere'; ")
    assert (
        done.returncode == 1
        and "nowhere has no Python.h: install python3-dev, or set UV_PYTHON" in done.stderr
    )
