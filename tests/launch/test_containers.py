"""What Kubernetes and YARN are handed, which start ranks in containers, and the image of these."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers.recipes import PROGRAM, script

from hvdtrain.config import recipes
from hvdtrain.config.run_config import RunConfig
from hvdtrain.errors import UsageError
from hvdtrain.launch.prepare import prepare
from hvdtrain.launch.recipe import JobSpec, expand

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def out(tmp_path):
    return tmp_path / "run"


RANK = "import json, os, sys; print(json.dumps([os.getcwd(), *map(os.getenv, sys.argv[1].split()), *sys.argv[2:]]))"


@pytest.mark.parametrize("name", ["a", 'it\'s "here" $(ls) `ls` \\ ü'])
def test_yarns_service_starts_a_container_a_rank(name, tmp_path):
    """With the script that a node makes of the command: ContainerLaunch in Hadoop 3 puts it between double quotes."""
    (folder := tmp_path / name).mkdir()
    variables = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"
    program = [sys.executable, "-c", RANK, variables, name]
    made = expand("yarn", JobSpec(4, program, out=tmp_path / "run", working_folder=str(folder)))
    [service] = map(json.loads, made.files.values())
    assert made.argv[:4] == ["yarn", "app", "-launch", service["name"]]
    [component] = service["components"]
    assert component["number_of_containers"] == 4
    command = component["launch_command"]
    for token, value in {"COMPONENT_ID": "3", "SERVICE_NAME": "s", "USER": "me", "DOMAIN": "example.org"}.items():
        command = command.replace(f"${{{token}}}", value)
    done = subprocess.run(["bash"], input=f'exec /bin/bash -c "{command}"\n', text=True, capture_output=True)
    assert done.stdout, done.stderr
    assert json.loads(done.stdout) == [str(folder), "3", "4", "0", "1", "rank-0.s.me.example.org", "29500", name]
    [constraint] = component["placement_policy"]["constraints"]  # one a node: LOCAL_RANK=0 is right
    assert (constraint["type"], constraint["scope"]) == ("ANTI_AFFINITY", "NODE")


def test_each_service_of_yarn_has_a_name_of_its_own(tmp_path):
    """As YARN takes it, ServiceApiUtil: a label of DNS that begins with a letter."""
    names = {expand("yarn", JobSpec(2, ["x"], out=tmp_path / "My_Run" / ("r" * 99))).name for _ in range(3)}
    assert len(names) == 3 and all(re.fullmatch("[a-z][a-z0-9-]{1,62}", name) for name in names)


# Of the MPI operator's CustomResourceDefinition, kubeflow.org/v2beta1: which fields there are, and their types.
MPI_JOB = {
    "apiVersion": str, "kind": str, "metadata": {"generateName": str},
    "spec": {
        "slotsPerWorker": int, "mpiImplementation": str, "launcherCreationPolicy": str,
        "runPolicy": {"cleanPodPolicy": str, "backoffLimit": int},
        "mpiReplicaSpecs": {"Launcher": dict, "Worker": dict},
    },
}  # fmt: skip


def fits(value, schema):
    if isinstance(schema, dict):
        assert value.keys() == schema.keys()
        for key, inner in schema.items():
            fits(value[key], inner)
    else:
        assert isinstance(value, schema)


def test_kubernetes_gets_an_mpi_job(out):
    words, text = script("kubernetes", out)
    assert words[:3] == ["kubectl", "create", "--output=name"]  # with a name of its own each time: never "unchanged"
    job = yaml.safe_load(text)
    fits(job, MPI_JOB)
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    assert job["metadata"] == {"generateName": "hvdtrain-run-"}
    assert job["spec"]["mpiImplementation"] in ("OpenMPI", "Intel", "MPICH")
    replicas = job["spec"]["mpiReplicaSpecs"]
    assert (replicas["Launcher"]["replicas"], replicas["Worker"]["replicas"]) == (1, 4)
    [launcher] = replicas["Launcher"]["template"]["spec"]["containers"]
    assert launcher["command"][-2:] == ["-np", "4"] and launcher["args"] == PROGRAM
    # OpenMPI 5 does not read the variable in which the operator names it: all ranks would start in the launcher's pod.
    assert "--hostfile /etc/mpi/hostfile" in shlex.join(launcher["command"])
    [worker] = replicas["Worker"]["template"]["spec"]["containers"]
    assert worker["command"][-1].endswith("exec /usr/sbin/sshd -De")
    mounted = [container["volumeMounts"] for container in (launcher, worker)]
    assert mounted[0] == mounted[1] == [{"name": "runs", "mountPath": "/runs"}]


def test_ranks_on_kubernetes_have_the_images_python_and_folders(tmp_path):
    config = RunConfig(mode="allreduce", dataset="/data/coil")
    made = prepare("kubernetes", config, 2, (), tmp_path / "My run")
    [text] = made.files.values()
    args = yaml.safe_load(text)["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]["args"]
    assert args[2:5] == ["/opt/hvdtrain/bin/python", "-m", "hvdtrain"] and str(tmp_path) not in text
    assert args[args.index("--out") + 1] == "/runs/My run" and args[args.index("--dataset") + 1] == "/data/coil"
    for dataset in ("./coil", "~/coil", "data/coil"):
        with pytest.raises(
            UsageError, match=f"--dataset {dataset} is on this machine: --launcher kubernetes runs else"
        ):
            prepare("kubernetes", RunConfig(mode="allreduce", dataset=dataset), 2, (), tmp_path / "run")


def test_the_image_has_what_its_recipe_names():
    """How it is built: `hadolint launchers/Containerfile` finds no fault in it; no pod has run it."""
    text, recipe = (ROOT / "launchers" / "Containerfile").read_text(), recipes.load("launchers", "kubernetes")
    environment = str(Path(recipe["interpreter"]).parent.parent)
    assert f"UV_PROJECT_ENVIRONMENT={environment} " in text
    assert {"g++", "make"} <= set(text.split("\nFROM ")[1].split())  # what builds Horovod
    assert f"COPY --from=build {environment} {environment}" in text and f"WORKDIR {recipe['runs']}" in text
    copied = {word for line in text.splitlines() if line.startswith("COPY ") for word in line.split()[1:-1]}
    assert {word for word in copied if not word.startswith(("--", "/"))} == {
        "pyproject.toml", "README.md", "hvdtrain", "datasets", "launchers",
    }  # fmt: skip
    assert all((ROOT / word).exists() for word in copied if not word.startswith(("--", "/")))
