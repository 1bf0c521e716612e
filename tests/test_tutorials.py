"""Every tutorial runs from top to bottom: its files are written and its commands run, in order.

What they print is not compared with the page, since most of it is times. Commands that fail, and
pages whose steps no longer fit each other, are found.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers.fenced import blocks, joined
from helpers.jobs import ENV, SETTINGS
from helpers.nodes import leave_out, why_not
from helpers.slurm import cluster_on_two_nodes

from hvdtrain.launch import testbed

ROOT = Path(__file__).parent.parent
TUTORIALS = ROOT / "hvdtrain" / "tutorials"
pytestmark = [
    pytest.mark.tutorials,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("tutorials"),  # one after the other: comparisons repeat disturbed runs
]


def work_through(page: str, folder: Path, env: dict[str, str] = ENV) -> None:
    """Does what a reader does who begins in that folder. `pytest -rP` shows what was printed."""
    for block in blocks((TUTORIALS / page).read_text(encoding="utf-8")):
        if block.language in ("python", "sbatch"):
            file = folder / block.file
            file.parent.mkdir(parents=True, exist_ok=True)
            before = file.read_text(encoding="utf-8") if block.is_added else ""
            file.write_text(f"{before}\n\n{block.text}" if before else block.text, encoding="utf-8")
        for command in joined(block.text) if block.language == "bash" else ():
            words = ["bash", "-euo", "pipefail", "-c", command]
            done = subprocess.run(words, cwd=folder, timeout=450, **SETTINGS | {"env": env})
            print(f"$ {command}\n{done.stdout}")
            assert done.returncode == 0
            assert "Traceback" not in done.stdout


@pytest.mark.parametrize(("page", "hosts"), [("lecturer.md", "lab"), ("hosts.md", "duo")])
def test_a_tutorial_that_makes_hosts(page, hosts, tmp_path):
    leave_out(why_not())
    try:
        work_through(page, tmp_path)
    finally:
        testbed.down(testbed.NodeSet(hosts))


def test_the_cluster_tutorial(tmp_path):
    """On a Slurm of two nodes, which are hosts of this machine; on a real one, nodes have one network."""
    (own := tmp_path / "slurm").mkdir()
    with cluster_on_two_nodes(own) as slurm:
        env = slurm | {"PATH": ENV["PATH"], "HVDTRAIN_INTERFACE": testbed.INTERFACE}
        work_through("cluster.md", tmp_path, env)


def test_the_researchers_tutorial(tmp_path):
    """In a copy of the checkout, in which the reader's mode and codec are added."""
    for name in ("hvdtrain", "datasets", "launchers"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    work_through("researcher.md", tmp_path, ENV | {"PYTHONPATH": path})


def test_the_migrants_tutorial(tmp_path):
    work_through("migrant.md", tmp_path)
