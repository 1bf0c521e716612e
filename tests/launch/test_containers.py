"""What Kubernetes and YARN are handed, which start ranks in containers, and the image of these."""

import json
import shlex
from pathlib import Path

import pytest
import yaml
from helpers.recipes import PROGRAM, script

from hvdtrain.config import recipes
from hvdtrain.config.run_config import RunConfig
from hvdtrain.errors import UsageError
from hvdtrain.launch.prepare import prepare

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def out(tmp_path):
    return tmp_path / "run"


@pytest.mark.parametrize("folder", ["/a", '/it\'s "here" $(ls) \\ ü'])
def test_yarns_service_starts_a_container_a_rank(folder, out):
    words, text = script("yarn", out, working_folder=folder)
    assert words[:4] == ["yarn", "app", "-launch", "hvdtrain-run"]
    service = json.loads(text)
    [component] = service["components"]
    assert component["number_of_containers"] == 4
    command = shlex.split(component["launch_command"])
    assert command[:2] == ["RANK=${COMPONENT_ID}", "WORLD_SIZE=4"]
    assert "MASTER_ADDR=rank-0.${SERVICE_NAME}.${USER}.${DOMAIN}" in command
    assert command[-len(PROGRAM) - 1 :] == [folder, *PROGRAM]
    [constraint] = component["placement_policy"]["constraints"]  # one a node: LOCAL_RANK=0 is right
    assert (constraint["type"], constraint["scope"]) == ("ANTI_AFFINITY", "NODE") and "LOCAL_RANK=0" in command


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
