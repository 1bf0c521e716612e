"""From the options of a training job, or from a program, to the command that starts it, with its hosts checked."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain import modes
from hvdtrain.config.recipes import Launcher
from hvdtrain.config.run_config import RunConfig
from hvdtrain.errors import UsageError
from hvdtrain.launch import testbed
from hvdtrain.launch.hosts import Host, code_path
from hvdtrain.launch.memory import BASE_MB, asked_mb, rank_mb
from hvdtrain.launch.preflight import Requirements, check_hosts
from hvdtrain.launch.private_network import needs_network
from hvdtrain.launch.recipe import SLOTS, JobSpec, LaunchCommand, expand, join_program, train_program
from hvdtrain.runs.launched import LAUNCHER, Launched, Pair
from hvdtrain.runs.request import with_absolute_paths
from hvdtrain.system.own_code import file_of, with_file
from hvdtrain.world import network
from hvdtrain.world.network import WIRE_KEY, new_wire_key
from hvdtrain.world.place import ELASTIC, RESPAWNS


def prepare(
    recipe: Launcher, config: RunConfig, workers: int, hosts: Sequence[Host], out: Path, check: bool = True,
    working_folder: str = "", interface: str = "", resume: bool = False, all_options: bool = False,
    measure: bool = False, secrets: Mapping[str, str] | None = None, respawn: bool = False,
    elastic: bool = False,
) -> LaunchCommand:  # fmt: skip
    """The command that starts a training job.

    Args:
        hosts: each with the slots that the job uses; empty where the launcher finds hosts itself.
        check: check the hosts first, if the launcher needs them: a scheduler knows its own.
        working_folder: where ranks start on the hosts, a copy of the code; by default the current folder.
        interface: the network interface by which hosts reach each other; by default HVDTRAIN_INTERFACE, or one is
            chosen.
        resume: go on with what is in the run folder: also where the job is started again after a failure.
        all_options: name every option to the ranks, since the run folder may have other values.
        measure: where hosts are checked, measure the network between them too, for the manifest.
        secrets: variables for every rank that no command line may show.
        respawn: workers that are lost will be started again.
        elastic: a ring goes on without workers that are lost.

    Raises:
        UsageError: a host cannot run it, or the launcher needs hosts.
    """
    runs_there = out
    if recipe.runs:  # ranks see other folders than this machine
        _check_paths(recipe.name, config)
        runs_there = Path(recipe.runs, out.name)
    memory_mb, needs = asked_mb(config, workers), requirements(config, workers, out, working_folder)
    config = _with_code_in(working_folder, with_absolute_paths(config))
    program = train_program(config, runs_there, all_options, recipe.interpreter)
    program += ["--resume"] if resume else []
    if recipe.script_name:  # not every scheduler passes the environment on
        program = ["env", f"{LAUNCHER}={recipe.name}@{recipe.digest}", *program]
    secrets = dict(secrets or {})
    if config.wire == "zmq" or elastic:
        secrets[WIRE_KEY] = os.environ.get(WIRE_KEY) or new_wire_key()
    ranks, survives = workers + config.servers, elastic or modes.declared(config.mode).survives_lost_worker
    environment = {ELASTIC: "1"} if elastic else {RESPAWNS: "1"} if respawn else {}
    spec = JobSpec(
        ranks, program, config.servers, hosts, out, interface, working_folder, survives,
        join=join_program(runs_there, recipe.interpreter) if respawn else (),
        secrets=secrets, needs_network=needs_network(config), environment=environment,
        memory_mb=memory_mb, gpus=int(config.device == "cuda"),
    )  # fmt: skip
    return prepare_program(recipe, spec, needs, check, measure)


def requirements(config: RunConfig, workers: int, out: Path, working_folder: str = "") -> Requirements:
    """What a training job needs of each host; see prepare."""
    config = _with_code_in(working_folder, with_absolute_paths(config))
    places = (config.dataset, config.model, config.pretrained)
    files = [str(file_of(place) or place) for place in places if place.startswith("/")]
    least_mb = rank_mb(config, workers)
    return Requirements(working_folder, out, files, least_mb, disk_mb=least_mb - BASE_MB, cuda=config.device == "cuda")


def _with_code_in(working_folder: str, config: RunConfig) -> RunConfig:
    """With the user's files in the copy of the current folder on the hosts, where they travel with it."""
    here, moved = Path.cwd(), dict[str, Any]()
    for name in ("model", "dataset"):
        value = getattr(config, name)
        if working_folder and (file := file_of(value)) and file.is_relative_to(here):
            moved[name] = with_file(value, Path(working_folder, file.relative_to(here)))
    return dataclasses.replace(config, **moved)


def _check_paths(launcher: str, config: RunConfig) -> None:
    """UsageError for files that are named from this machine's current folder: ranks do not know it."""
    given = (("--dataset", config.dataset), ("--model", config.model), ("--pretrained", config.pretrained))
    for option, path in given:
        is_here = path.startswith((".", "~")) or (bool(file_of(path)) and not path.startswith("/"))
        if is_here or ("/" in path and "://" not in path and not path.startswith("/")):
            raise UsageError(
                f"{option} {path} is on this machine: --launcher {launcher} runs elsewhere, give its path there, from /"
            )


def prepare_program(
    recipe: Launcher, spec: JobSpec, requirements: Requirements, check: bool = True, measure: bool = False
) -> LaunchCommand:
    """The command that starts a job of any program of ours; its `interface` and `environment` are completed.

    Args:
        requirements: what its hosts are asked for, where there are any and `check` is true.
        measure: as prepare.

    Raises:
        UsageError: as prepare.
    """
    environment = dict(spec.environment)
    if spec.working_folder:
        environment["PYTHONPATH"] = code_path(spec.working_folder)
    interface = spec.interface or os.environ.get(network.VARIABLE, "")
    network_pairs: tuple[Pair, ...] = ()
    if set(testbed.running_nodes()) & {host.name for host in spec.hosts}:
        interface = interface or testbed.INTERFACE
        environment["HVDTRAIN_OVER_TCP"] = "1"  # these hosts share memory, which rpc would find and use
    if spec.hosts and check and recipe.hosts == "needed":
        required = dataclasses.replace(requirements, interface=interface)
        chosen, network_pairs = check_hosts(spec.hosts, required, measure)
        interface = chosen or interface
    hosts = tuple(map(str, spec.hosts))
    launched = Launched(recipe.name, hosts, interface, spec.working_folder, network_pairs, recipe.digest)
    environment |= launched.variables()  # ranks have all that carries bytes use the interface
    if spec.servers and spec.hosts:  # horovodrun numbers ranks host by host: ranks spread the servers with this
        environment[SLOTS] = ",".join(str(host.slots) for host in spec.hosts)
    return expand(recipe, dataclasses.replace(spec, interface=interface, environment=environment))
