"""How a job was launched: `launch` and `compare` tell its ranks in variables, and the run's manifest remembers it."""

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from hvdtrain.config.run_config import RunConfig
from hvdtrain.world.network import VARIABLE as INTERFACE

LAUNCHER, HOSTS, FOLDER, NETWORK = (f"HVDTRAIN_{name}" for name in ("LAUNCHER", "HOSTS", "FOLDER", "NETWORK"))
Pair = dict[str, Any]  # from, to, gbit_s


class Launched(Struct, frozen=True):
    """How a job was launched.

    Attributes:
        launcher: the recipe's name: see config.recipes.
        hosts: as `a:2`, each with its ranks; empty where the launcher found them itself.
        interface: the network interface by which they reach each other, or empty.
        folder: where the ranks were started on the hosts, if not where the launcher was.
        network: what was measured between the hosts, in each direction: see launch.preflight.
        recipe: a hash of the recipe.
    """

    launcher: str = ""
    hosts: tuple[str, ...] = ()
    interface: str = ""
    folder: str = ""
    network: tuple[Pair, ...] = ()
    recipe: str = ""

    def variables(self) -> dict[str, str]:
        """For the environment of every rank; nothing in them needs quoting, wherever they are written."""
        pairs = [f"{p['from']},{p['to']},{p['gbit_s']}" for p in self.network]
        values = {
            LAUNCHER: f"{self.launcher}@{self.recipe}", HOSTS: ",".join(self.hosts), FOLDER: self.folder,
            NETWORK: "/".join(pairs), INTERFACE: self.interface,
        }  # fmt: skip
        return {name: value for name, value in values.items() if value}

    def place_options(self) -> list[str]:
        """The words with which `hvdtrain launch` is told where."""
        words = ["--launcher", self.launcher] if self.launcher not in ("", "local") else []
        words += ["-H", ",".join(self.hosts)] if self.hosts else []
        words += ["--sync-dst-dir", self.folder] if self.folder else []
        return words + (["--network-interface", self.interface] if len(self.hosts) > 1 and self.interface else [])


def read_launched(env: Mapping[str, str] = os.environ) -> Launched | None:
    """How this rank's job was launched; None where another starter did it."""
    if LAUNCHER not in env:
        return None
    hosts = tuple(env[HOSTS].split(",")) if env.get(HOSTS) else ()
    pairs = [pair.split(",") for pair in env.get(NETWORK, "").split("/") if pair]
    network = tuple({"from": one, "to": other, "gbit_s": float(speed)} for one, other, speed in pairs)
    launcher, _, recipe = env[LAUNCHER].partition("@")
    return Launched(launcher, hosts, env.get(INTERFACE, ""), env.get(FOLDER, ""), network, recipe)


def remembered(run: Path) -> Launched | None:
    """How the job of a run folder was launched last, from its manifest; None where that does not say."""
    from hvdtrain.runs.schema import Manifest, find  # which has Launched as a field

    manifest = find(run, Manifest)
    return manifest.launch if manifest and manifest.launch and manifest.launch.launcher else None


def job_command(
    config: RunConfig, workers: int, launched: Launched, out: Path | str = "", secrets: Iterable[str] = ()
) -> list[str]:
    """The words with which a shell starts such a job: one process of this machine, or by `hvdtrain launch`.

    Args:
        secrets: the names of variables for --env.
    """
    to_folder = ["--out", str(out)] if out else []
    if workers + config.servers == 1 and not launched.hosts:
        return ["hvdtrain", "train", *config.to_args(), *to_folder]
    words = ["hvdtrain", "launch", "-n", str(workers)]
    words += ["-s", str(config.servers)] if config.servers else []
    words += launched.place_options()
    words += [word for name in secrets for word in ("--env", name)]
    options = dataclasses.replace(config, servers=0).to_args()
    mode = ["--mode", "single"] if config.mode == "single" else []  # train's default, and not launch's
    return [*words, *to_folder, "--", *mode, *options]
