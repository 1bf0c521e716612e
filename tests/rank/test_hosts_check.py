"""Hosts that a scheduler chose are compared when their ranks have met, in place of ranks that hang."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from helpers import jobs
from helpers.jobs import SETTINGS, SMALL
from helpers.nodes import leave_out

import hvdtrain
from hvdtrain.base.world.network import free_port


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("beside_digits")
def test_other_code_on_a_host_is_a_line_on_the_first_rank_and_ends_all(tmp_path):
    """The second rank's host has another name, and a copy of the package with a line more."""
    leave_out("another name of this host needs root" if os.geteuid() else "")
    other, out = tmp_path / "other", tmp_path / "run"
    shutil.copytree(
        Path(hvdtrain.__file__).parent,
        other / "hvdtrain",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    with (other / "hvdtrain" / "base/errors.py").open("a") as file:
        file.write("# edited\n")
    words = [sys.executable, "-Pm", "hvdtrain", "train", "--mode", "ddp", *SMALL, "--out", str(out)]
    renamed = ["unshare", "--uts", "sh", "-c", 'hostname localhost && exec "$@"', "sh", *words]
    place = {
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "HVDTRAIN_LAUNCHER": "x@y",
    }
    place |= {"HVDTRAIN_INTERFACE": "lo"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
    env = SETTINGS["env"] | place | {"RANK": "1", "PYTHONPATH": str(other)}
    with subprocess.Popen(renamed, **SETTINGS | {"env": env}) as second:
        first = jobs.hvdtrain(*words[3:], env=place | {"RANK": "0"}, timeout=90)
        printed, _ = second.communicate(timeout=30)
    assert (first.returncode, second.returncode) == (2, 2), first.stdout + printed
    assert [line for line in first.stdout.splitlines() if "hvdtrain: " in line] == [
        first.stdout.strip()
    ]
    assert (
        first.stdout.startswith(f"hvdtrain: localhost: hvdtrain {version('hvdtrain')} (")
        and f" in {other}/hvdtrain, here" in first.stdout
    )
    assert not printed and not (out / "config.toml").exists()
