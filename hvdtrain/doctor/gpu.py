"""Checks of GPUs, their driver and NCCL, by what torch and Horovod say of them: see software.library_facts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.doctor.findings import MISSING, OK, WARNING, Finding

BUILD = "`HOROVOD_GPU_OPERATIONS=NCCL uv sync --reinstall-package horovod` (5 minutes) builds it"
NO_TORCH = Finding(MISSING, "unknown, since torch does not load", "see there")


def gpus(facts: Mapping[str, Any]) -> Finding:
    """The GPUs that torch sees."""
    if "gpus" not in facts:
        return NO_TORCH
    found = facts["gpus"]
    if not found and Path("/dev/nvidiactl").exists():
        return Finding(WARNING, "there is a driver, and torch sees none", "`nvidia-smi` shows whether it works")
    return Finding(OK, ", ".join(found) or "none: training runs on the CPU")


def driver(facts: Mapping[str, Any]) -> Finding:
    """Whether the driver is new enough for the CUDA version that torch is built with."""
    if "gpus" not in facts:
        return NO_TORCH
    if "driver" not in facts:
        return Finding(OK, "none")
    major, minor = divmod(facts["driver"], 1000)
    found = f"for CUDA {major}.{minor // 10}"
    if facts["cuda"] is None:
        return Finding(WARNING, f"{found}; torch is built without CUDA", "`uv sync --reinstall-package torch`")
    found += f"; torch is built with {facts['cuda']}"
    needed = int(facts["cuda"].split(".")[0])
    if major < needed:
        return Finding(WARNING, found, f"install a driver for CUDA {needed}, or use --device cpu")
    return Finding(OK, found)


def horovod_nccl(facts: Mapping[str, Any]) -> Finding:
    """Whether Horovod is built with torch's NCCL: torch has loaded that before Horovod starts."""
    if "NCCL" not in facts:
        return Finding(MISSING, "unknown, since Horovod does not load", "see there")
    torch_nccl, code = facts["torch_nccl"], facts["NCCL"]
    if not code and not facts["gpus"]:
        return Finding(OK, "not built in, and there is no GPU to use it")
    if not code:
        return Finding(WARNING, "not built in", f"gradients are staged through CPU memory; {BUILD} in")
    built = [code // 10_000, code // 100 % 100, code % 100]
    found = f"built with {'.'.join(map(str, built))}"
    if torch_nccl and built != list(torch_nccl):
        return Finding(WARNING, f"{found}, not torch's {'.'.join(map(str, torch_nccl))}", f"{BUILD} with that")
    return Finding(OK, found)
