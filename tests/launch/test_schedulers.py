"""What schedulers that are not here are handed: the parts that a shell can run, run."""

import json
import os
import shlex
import signal
import subprocess
import sys

import pytest
from helpers.jobs import SETTINGS, until

from hvdtrain.base.config import recipes
from hvdtrain.launch.recipe import JobSpec, expand

RANK = "import json, os, sys; print(json.dumps([os.getenv(name) for name in sys.argv[1:]]))"
VARIABLES = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]


def handed(launcher, program, out):
    """A scheduler's file for two ranks."""
    made = expand(
        recipes.launcher(launcher), JobSpec(2, program, out=out, working_folder=str(out.parent))
    )
    [text] = made.files.values()
    return made, text


def test_a_pod_of_a_jobset_knows_its_rank_and_the_first_ones_name(tmp_path):
    made, text = handed("jobset", [sys.executable, "-c", RANK, *VARIABLES], tmp_path / "run")
    spec = json.loads(text)["spec"]
    assert spec["network"] == {"enableDNSHostnames": True, "subdomain": made.name}
    [group] = spec["replicatedJobs"]
    job = group["template"]["spec"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (2, 2, "Indexed")
    [container] = job["template"]["spec"]["containers"]
    assert container["command"][0] == sys.executable  # a list of words
    index, *others = container["env"]
    assert index["valueFrom"]["fieldRef"]["fieldPath"].endswith("job-completion-index']")
    values = {entry["name"]: entry["value"] for entry in others}
    assert all(isinstance(value, str) for value in values.values())  # as Kubernetes wants it
    first = f"{made.name}-{group['name']}-0-0.{made.name}"
    assert [values[name] for name in VARIABLES] == [
        "$(JOB_COMPLETION_INDEX)",
        "2",
        "0",
        "1",
        first,
        "29500",
    ]
    assert len(f"{made.name}-{group['name']}-0-4095") <= 63  # a pod's host name


def test_a_node_of_a_cloud_knows_its_rank(tmp_path):
    _, text = handed("skypilot", [sys.executable, "-c", RANK, *VARIABLES], tmp_path / "run")
    task = json.loads(text)
    assert task["num_nodes"] == 2 and task["envs"] == {"HVDTRAIN_MEETING_S": "1800"}
    env = {
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8",
    }
    done = subprocess.run(
        ["bash", "-c", task["run"]], **SETTINGS | {"env": os.environ | env}, timeout=30
    )
    assert json.loads(done.stdout) == ["1", "2", "0", "1", "10.0.0.7", "29500"]


@pytest.mark.timeout(90)
def test_a_job_of_pbs_starts_ranks_and_tells_them_to_leave(tmp_path):
    (out := tmp_path / "it's a run").with_name("it's a run.launch").mkdir()
    rank = "trap 'echo asked; sleep 1; exit 143' USR1; echo begun; while :; do sleep 0.1; done"
    made, text = handed("pbs", ["bash", "-c", rank], out)
    assert len(made.name) <= 15 and "#PBS -l select=2:ncpus=1:mpiprocs=1\n" in text
    assert shlex.quote(str(tmp_path)) in text and "if_include" not in text
    (script := tmp_path / "job.pbs").write_text(text)
    (tmp_path / "nodes").write_text("localhost\nlocalhost\n")
    env = os.environ | {"PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_JOBID": "7.here"}
    (secret := out.with_name("it's a run.launch") / "environment").write_text("")
    log = out.with_name("it's a run.launch") / "pbs-7.here.log"
    with subprocess.Popen(["bash", str(script)], **SETTINGS | {"env": env}) as job:
        try:
            until(lambda: log.exists() and log.read_text().count("begun") == 2, 60)
        finally:
            job.send_signal(signal.SIGTERM)
        assert job.wait(30) == 143, log.read_text()
    assert log.read_text().count("asked") == 2 and secret.exists()  # it may come back
    for code in (0, 3):
        _, text = handed("pbs", ["sh", "-c", f"exit {code}"], out)
        script.write_text(text)
        secret.write_text("")
        done = subprocess.run(["bash", str(script)], **SETTINGS | {"env": env}, timeout=30)
        assert bool(done.returncode) == bool(code) and not secret.exists(), log.read_text()
