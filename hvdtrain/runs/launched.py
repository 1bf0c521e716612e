"""How a job was launched.

`launch` and `compare` hand it to the ranks in environment variables; the run's manifest records it.
"""

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import UsageError
from hvdtrain.base.world.network import VARIABLE as INTERFACE

LAUNCHER = "HVDTRAIN_LAUNCHER"
HOSTS = "HVDTRAIN_HOSTS"
FOLDER = "HVDTRAIN_FOLDER"
NETWORK = "HVDTRAIN_NETWORK"
Pair = dict[str, Any]  # with the keys from, to, gbit_s
_PAIR = re.compile(r"([^,/]+),([^,/]+),(\d+(?:\.\d+)?(?:e[+-]?\d{1,3})?)")


class Launched(Struct, frozen=True):
    """How a job was launched.

    Attributes:
        launcher: the name of the launcher's recipe: see config.recipes.
        hosts: each with its number of slots, as `a:2`; empty if the launcher found them itself.
        interface: the network interface by which the hosts reach each other, or empty.
        folder: where the ranks were started on the hosts; empty for the launcher's folder.
        network: the measured throughput between hosts in each direction: see launch.preflight.
        recipe: a hash of the recipe.
    """

    launcher: str = ""
    hosts: tuple[str, ...] = ()
    interface: str = ""
    folder: str = ""
    network: tuple[Pair, ...] = ()
    recipe: str = ""

    def variables(self) -> dict[str, str]:
        """Returns variables for the environment of every rank. Their values need no quoting."""
        pairs = [f"{p['from']},{p['to']},{p['gbit_s']}" for p in self.network]
        values = {
            LAUNCHER: f"{self.launcher}@{self.recipe}",
            HOSTS: ",".join(self.hosts),
            FOLDER: self.folder,
            NETWORK: "/".join(pairs),
            INTERFACE: self.interface,
        }
        return {name: value for name, value in values.items() if value}

    def place_options(self) -> list[str]:
        """Returns the options of `hvdtrain launch` for launcher, hosts, folder and interface."""
        words = []
        if self.launcher not in ("", "local"):
            words += ["--launcher", self.launcher]
        if self.hosts:
            words += ["-H", ",".join(self.hosts)]
        if self.folder:
            words += ["--sync-dst-dir", self.folder]
        if self.interface and len(self.hosts) > 1:
            words += ["--network-interface", self.interface]
        return words


def read_launched(env: Mapping[str, str] = os.environ) -> Launched | None:
    """Returns how this rank's job was launched; None if not by `hvdtrain`.

    Raises:
        UsageError: a variable is not as `hvdtrain launch` sets it.
    """
    if LAUNCHER not in env:
        return None
    hosts = tuple(env[HOSTS].split(",")) if env.get(HOSTS) else ()
    pairs = [_PAIR.fullmatch(pair) for pair in env.get(NETWORK, "").split("/") if pair]
    if not all(pairs):
        raise UsageError(
            f"{NETWORK} in the environment is not as `hvdtrain launch` sets it: unset it"
        )
    network = tuple(
        {"from": pair[1], "to": pair[2], "gbit_s": float(pair[3])} for pair in pairs if pair
    )
    launcher, _, recipe = env[LAUNCHER].partition("@")
    return Launched(launcher, hosts, env.get(INTERFACE, ""), env.get(FOLDER, ""), network, recipe)


def job_command(
    config: RunConfig,
    workers: int,
    launched: Launched,
    out: Path | str = "",
    secrets: Iterable[str] = (),
) -> list[str]:
    """Returns the command that runs such a job: `hvdtrain train` for one process on this machine.

    Args:
        secrets: the names of variables for --env.

    Returns:
        The command's words.
    """
    out_option = ["--out", str(out)] if out else []
    if workers + config.servers == 1 and not launched.hosts:
        return ["hvdtrain", "train", *config.to_args(), *out_option]
    words = ["hvdtrain", "launch", "-n", str(workers)]
    if config.servers:
        words += ["-s", str(config.servers)]
    words += launched.place_options()
    for name in secrets:
        words += ["--env", name]
    words += [*out_option, "--"]
    if (
        config.mode == "single"
    ):  # to_args leaves out the default of `train`, but `launch` has another
        words += ["--mode", "single"]
    return words + dataclasses.replace(config, servers=0).to_args()
