"""The hosts of the allocation in which this process runs: Slurm nodes, Kubernetes worker pods."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import click

from hvdtrain.base.config.command_line import given_options
from hvdtrain.base.config.recipes import Launcher
from hvdtrain.base.errors import UsageError
from hvdtrain.base.system.variables import whole_number
from hvdtrain.base.world.place import in_step, tasks_by_node
from hvdtrain.launch.hosts import Host, given_hosts, parse_hostfile

# Where the MPI operator puts the hosts into the launcher's pod.
POD_HOSTFILE = Path("/etc/mpi/hostfile")


def hosts_or_here(ctx: click.Context) -> list[Host]:
    """Returns the hosts of a command with host_options and launcher_option; none for this machine.

    Without given hosts they are the hosts of the allocation that a given launcher uses.

    Raises:
        UsageError: the launcher hands jobs over, or is given without hosts.
    """
    listed = given_hosts(ctx.params["hosts"], ctx.params["hostfile"])
    is_given = given_options(ctx, ["launcher"])
    recipe = ctx.params["launcher"]
    if recipe.script_name:
        raise UsageError(
            f"--launcher {recipe.name} hands jobs over to a scheduler: take one that waits for them"
        )
    if is_given and not listed:
        listed = allocated_hosts(recipe)
    if is_given and not listed:
        raise UsageError(
            "--launcher is for hosts: give -H or --hostfile; without them all runs are on this "
            "machine"
        )
    return listed


def allocated_hosts(recipe: Launcher, env: Mapping[str, str] = os.environ) -> list[Host]:
    """Returns the hosts of the allocation that a recipe uses, each with its slots.

    They are none if the recipe needs hosts that are named.

    Raises:
        UsageError: this process runs in no allocation.
    """
    if recipe.hosts_from == "slurm":
        return _slurm_hosts(env)
    if recipe.hosts_from == "mpijob" and POD_HOSTFILE.is_file():
        return parse_hostfile(POD_HOSTFILE)
    return []


def _slurm_hosts(env: Mapping[str, str]) -> list[Host]:
    nodes = _slurm_nodes(env)
    tasks = []
    # Within a step the variable has the step's tasks.
    if env.get("SLURM_TASKS_PER_NODE") and not in_step(env):
        tasks = _by_node(env, "SLURM_TASKS_PER_NODE")
    if len(tasks) != len(nodes):
        cores_per_task = max(1, whole_number(env, "SLURM_CPUS_PER_TASK", "1"))
        cores = _by_node(env, "SLURM_JOB_CPUS_PER_NODE")
        tasks = [max(1, count // cores_per_task) for count in cores]
    return [Host(node, count) for node, count in zip(nodes, tasks, strict=True)]


def allocated_cores(env: Mapping[str, str] = os.environ) -> dict[str, float]:
    """Returns how many cores the Slurm allocation has on each of its nodes."""
    counts = _by_node(env, "SLURM_JOB_CPUS_PER_NODE")
    return dict(zip(_slurm_nodes(env), map(float, counts), strict=True))


def _by_node(env: Mapping[str, str], name: str) -> list[int]:
    """Returns the variable's numbers, one for each node.

    Raises:
        UsageError: the variable is not as Slurm sets it.
    """
    try:
        return tasks_by_node(env[name])
    except ValueError:
        raise UsageError(
            f"{name}={env[name]!a} in the environment is not what Slurm sets: unset it"
        ) from None


def _slurm_nodes(env: Mapping[str, str]) -> list[str]:
    if not env.get("SLURM_JOB_NODELIST") or not env.get("SLURM_JOB_CPUS_PER_NODE"):
        raise UsageError(
            "--launcher srun is for use inside a Slurm allocation: start this in salloc or sbatch"
        )
    try:
        command = ["scontrol", "show", "hostnames", env["SLURM_JOB_NODELIST"]]
        done = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=True,
            env=dict(env),
        )
        return done.stdout.split()
    except (OSError, subprocess.CalledProcessError) as error:
        raise UsageError(
            f"scontrol does not say which nodes this allocation has: {error}"
        ) from None
