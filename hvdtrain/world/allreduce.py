"""Which algorithm averages gradients in an all-reduce, as far as a process can know it."""

import os
from collections.abc import Mapping
from typing import NamedTuple

UNKNOWN = "unknown"
# Open MPI 5's names of the algorithms of its component `tuned`, by number: `ompi_info --param coll tuned --level 9`.
_TUNED = ("ignore", "basic_linear", "nonoverlapping", "recursive_doubling", "ring", "segmented_ring", "rabenseifner")


class Algorithm(NamedTuple):
    """An all-reduce's algorithm.

    Attributes:
        name: as its library calls it, in small letters, or UNKNOWN.
        evidence: how that is known, or why it is not.
    """

    name: str
    evidence: str


def find_algorithm(backend: str, hosts: int, env: Mapping[str, str] = os.environ) -> Algorithm | None:
    """The algorithm of a backend, as a manifest names it; None where it carries no all-reduce."""
    if "nccl" in backend:
        return _of_nccl(env, by_horovod=backend.startswith("horovod"))
    if "gloo" in backend:
        # Horovod 0.28.1 (gloo_operations.cc) and torch (ProcessGroupGloo.cpp) name none to gloo::allreduce.
        return Algorithm("ring", f"backend {backend}: Gloo's own choice where its caller makes none")
    if "mpi" in backend:
        return _of_open_mpi(env, hosts)
    return None


def _of_nccl(env: Mapping[str, str], by_horovod: bool) -> Algorithm:
    if by_horovod:
        for variable, name in (
            ("HOROVOD_TORUS_ALLREDUCE", "torus"), ("HOROVOD_HIERARCHICAL_ALLREDUCE", "hierarchical"),
        ):  # fmt: skip
            if _is_on(env, variable):
                return Algorithm(name, f"{variable}={env[variable]}")
        if _is_on(env, "HOROVOD_AUTOTUNE"):
            return Algorithm(UNKNOWN, "HOROVOD_AUTOTUNE tries hierarchical ones too")
    asked, protocol = env.get("NCCL_ALGO", ""), env.get("NCCL_PROTO", "")
    said = ", ".join(f"{name}={env[name]}" for name in ("NCCL_ALGO", "NCCL_PROTO") if env.get(name))
    if not asked.isalpha():  # none, several, or all but one
        return Algorithm(UNKNOWN, f"{said or 'NCCL_ALGO is not set'}: NCCL chooses by size and topology")
    return Algorithm(asked.lower() + (f" over {protocol.lower()}" if protocol.isalnum() else ""), said)


def _of_open_mpi(env: Mapping[str, str], hosts: int) -> Algorithm:
    variable = "OMPI_MCA_coll_tuned_allreduce_algorithm"
    asked = env.get(variable, "")
    name = _TUNED[int(asked)] if asked.isdecimal() and int(asked) < len(_TUNED) else asked
    if name not in _TUNED[1:]:
        said = f"{variable}={asked} forces none" if asked else f"{variable} is not set"
        return Algorithm(UNKNOWN, f"{said}: Open MPI chooses by size and number of ranks")
    if env.get("OMPI_MCA_coll_tuned_use_dynamic_rules", "").lower() not in ("1", "true", "yes", "enabled"):
        return Algorithm(UNKNOWN, f"{variable}={asked} counts for nothing without coll_tuned_use_dynamic_rules")
    if hosts > 1:  # its component `han` comes before `tuned` there, and takes one of its own
        return Algorithm(UNKNOWN, f"{variable}={asked} is for ranks of one host, where `han` joins several")
    return Algorithm(name, f"{variable}={asked}")


def _is_on(env: Mapping[str, str], variable: str) -> bool:
    """As Horovod reads it: a number that begins it is above zero."""
    value = env.get(variable, "").strip()
    return value.isdecimal() and int(value) > 0
