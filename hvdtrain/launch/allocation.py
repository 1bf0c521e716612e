"""The hosts that a cluster has given to the job in which this process runs: Slurm's nodes, Kubernetes' worker pods."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import click

from hvdtrain.config.command_line import given_options
from hvdtrain.config.recipes import Launcher
from hvdtrain.errors import UsageError
from hvdtrain.launch.hosts import Host, given_hosts, parse_hostfile
from hvdtrain.world.place import in_step, tasks_by_node

# Where the MPI operator puts the hosts into the launcher's pod.
POD_HOSTFILE = Path("/etc/mpi/hostfile")


def hosts_or_here(ctx: click.Context) -> list[Host]:
    """The hosts that a command with host_options and launcher_option was given, or those of the allocation that its
    launcher uses; none for this machine.
    """
    listed, is_given = given_hosts(ctx.params["hosts"], ctx.params["hostfile"]), given_options(ctx, ["launcher"])
    recipe = ctx.params["launcher"]
    if recipe.script_name:
        raise UsageError(f"--launcher {recipe.name} hands jobs over to a scheduler: take one that waits for them")
    if is_given and not listed:
        listed = allocated_hosts(recipe)
    if is_given and not listed:
        raise UsageError("--launcher is for hosts: give -H or --hostfile; without them all runs are on this machine")
    return listed


def allocated_hosts(recipe: Launcher, env: Mapping[str, str] = os.environ) -> list[Host]:
    """The hosts of the allocation that a recipe uses, each with its slots; none of one that needs them named.

    Raises:
        UsageError: this process runs in no allocation.
    """
    if recipe.hosts_from == "slurm":
        nodes = _slurm_nodes(env)
        told = "" if in_step(env) else env.get("SLURM_TASKS_PER_NODE")  # a step has its own tasks there
        tasks = tasks_by_node(told) if told else []
        if len(tasks) != len(nodes):
            each = int(env.get("SLURM_CPUS_PER_TASK", 1))
            tasks = [max(1, cores // each) for cores in tasks_by_node(env["SLURM_JOB_CPUS_PER_NODE"])]
        return [Host(node, count) for node, count in zip(nodes, tasks, strict=True)]
    return parse_hostfile(POD_HOSTFILE) if recipe.hosts_from == "mpijob" and POD_HOSTFILE.is_file() else []


def allocated_cores(env: Mapping[str, str] = os.environ) -> dict[str, float]:
    """How many cores the Slurm allocation has on each of its nodes."""
    counts = tasks_by_node(env["SLURM_JOB_CPUS_PER_NODE"])
    return dict(zip(_slurm_nodes(env), map(float, counts), strict=True))


def _slurm_nodes(env: Mapping[str, str]) -> list[str]:
    if not env.get("SLURM_JOB_NODELIST") or not env.get("SLURM_JOB_CPUS_PER_NODE"):
        raise UsageError("--launcher srun is for use inside a Slurm allocation: start this in salloc or sbatch")
    try:
        command = ["scontrol", "show", "hostnames", env["SLURM_JOB_NODELIST"]]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=dict(env)).stdout.split()
    except (OSError, subprocess.CalledProcessError) as error:
        raise UsageError(f"scontrol does not say which nodes this allocation has: {error}") from None
