"""What Kubernetes and YARN are handed, which start ranks in containers, and the image of these."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from helpers.jobs import until
from helpers.recipes import PROGRAM, script

from hvdtrain.base.config import recipes
from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import UsageError
from hvdtrain.launch.prepare import TrainingJob, prepare
from hvdtrain.launch.recipe import JobSpec, expand

ROOT = Path(__file__).parent.parent.parent

YARN, KUBERNETES = recipes.launcher("yarn"), recipes.launcher("kubernetes")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "run"


RANK = "import json, os, sys; print(json.dumps([os.getcwd(), *map(os.getenv, sys.argv[1].split()), *sys.argv[2:]]))"


@pytest.mark.parametrize("name", ["a", 'it\'s "here" $(ls) `ls` \\ ü'])
def test_yarns_service_starts_a_container_a_rank(name, tmp_path):
    """With the script that a node makes of the command: ContainerLaunch in Hadoop 3 puts it between
    double quotes.
    """
    (folder := tmp_path / name).mkdir()
    variables = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"
    program = [sys.executable, "-c", RANK, variables, name]
    made = expand(YARN, JobSpec(4, program, out=tmp_path / "run", working_folder=str(folder)))
    [service] = map(json.loads, made.files.values())
    assert made.argv[:4] == ["yarn", "app", "-launch", service["name"]]
    [component] = service["components"]
    assert component["number_of_containers"] == 4
    done = container(component["launch_command"], 3, tmp_path)
    assert done.wait(60) == 0 and (tmp_path / "stdout.txt").stat().st_size, (
        tmp_path / "stderr.txt"
    ).read_text()
    told = "3 4 0 1 rank-0.s.me.example.org 29500".split()
    assert json.loads((tmp_path / "stdout.txt").read_text()) == [str(folder), *told, name]
    [constraint] = component["placement_policy"]["constraints"]  # one a node: LOCAL_RANK=0 is right
    assert (constraint["type"], constraint["scope"]) == ("ANTI_AFFINITY", "NODE")


def container(command, number, logs):
    """What a node starts."""
    tokens = {"COMPONENT_ID": number, "SERVICE_NAME": "s", "USER": "me", "DOMAIN": "example.org"}
    for token, value in tokens.items():
        command = command.replace(f"${{{token}}}", str(value))
    script = f'exec /bin/bash -c "{command} 1>{logs}/stdout.txt 2>{logs}/stderr.txt"\n'
    return subprocess.Popen(["bash", "-c", script], start_new_session=True)


# Leaves at SIGTERM, once it may.
LEAVES_LATE = """
import os, signal, sys, time
def leave(*_):
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.02)
    sys.exit(9)
signal.signal(signal.SIGTERM, leave)
print(os.environ["MY_TOKEN"], flush=True)
time.sleep(60 if sys.argv[2:] else 0)
sys.exit(7)
"""


@pytest.mark.parametrize(
    ("rank", "is_told", "left"), [(0, False, False), (0, True, False), (1, True, True)]
)
def test_private_variables_of_a_service_are_gone_with_its_first_rank(rank, is_told, left, tmp_path):
    """Before that has left, which takes longer than YARN gives it."""
    (tmp_path / "rank.py").write_text(LEAVES_LATE)
    program = [
        sys.executable,
        str(tmp_path / "rank.py"),
        str(tmp_path / "may leave"),
        *(["stay"] if is_told else []),
    ]
    made = expand(
        YARN, JobSpec(2, program, out=tmp_path / "it's a run", secrets={"MY_TOKEN": "t0ken"})
    )
    for path, text in made.files.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    [component] = json.loads(text)["components"]
    started = container(component["launch_command"], rank, tmp_path)
    until(
        lambda: (
            (tmp_path / "stdout.txt").exists()
            and (tmp_path / "stdout.txt").read_text() == "t0ken\n"
        )
    )
    if is_told:
        os.killpg(started.pid, signal.SIGTERM)
        until(lambda: made.secrets_file.exists() == left)
        assert started.poll() is None
        (tmp_path / "may leave").touch()
    assert started.wait(20) == (9 if is_told else 7)
    assert made.secrets_file.exists() == left


def test_each_service_of_yarn_has_a_name_of_its_own(tmp_path):
    """As YARN takes it, ServiceApiUtil: a label of DNS that begins with a letter."""
    names = {
        expand(YARN, JobSpec(2, ["x"], out=tmp_path / "My_Run" / ("r" * 99))).name for _ in range(3)
    }
    assert len(names) == 3 and all(re.fullmatch("[a-z][a-z0-9-]{1,62}", name) for name in names)


def test_kubernetes_gets_an_mpi_job(out):
    words, text = script("kubernetes", out)
    # with another name each time: never "unchanged"
    assert "kubectl create --output=name" in words[2]
    job = json.loads(text)
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    assert job["metadata"] == {"generateName": "hvdtrain-run-"}
    assert job["spec"]["runPolicy"]["backoffLimit"] > 0  # a launcher that was preempted comes back
    replicas = job["spec"]["mpiReplicaSpecs"]
    assert (replicas["Launcher"]["replicas"], replicas["Worker"]["replicas"]) == (1, 4)
    [launcher], [worker] = (
        replicas[role]["template"]["spec"]["containers"] for role in ("Launcher", "Worker")
    )
    assert launcher["command"][-2:] == ["-np", "4"] and launcher["args"] == PROGRAM
    # OpenMPI 5 does not read the variable in which the operator names it: all ranks would start in
    # the launcher's pod.
    assert "--hostfile /etc/mpi/hostfile" in shlex.join(launcher["command"])
    # Of `latest` the cluster would ask a registry each time.
    assert worker["image"] == launcher["image"] == f"hvdtrain:{version('hvdtrain')}"
    assert (
        worker["volumeMounts"]
        == launcher["volumeMounts"]
        == [{"name": "runs", "mountPath": "/runs"}]
    )


def test_ranks_on_kubernetes_have_the_images_python_and_folders(tmp_path):
    config = RunConfig(mode="allreduce", dataset="/data/coil")
    made = prepare(KUBERNETES, TrainingJob(config, 2, (), tmp_path / "My run"))
    [text] = made.files.values()
    args = json.loads(text)["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"][
        "containers"
    ][0]["args"]
    assert (
        args[2:5] == ["/opt/hvdtrain/bin/python", "-Pm", "hvdtrain"] and str(tmp_path) not in text
    )
    assert (
        args[args.index("--out") + 1] == "/runs/My run"
        and args[args.index("--dataset") + 1] == "/data/coil"
    )
    for dataset in ("./coil", "~/coil", "data/coil"):
        with pytest.raises(
            UsageError,
            match=f"--dataset {dataset} is on this machine: --launcher kubernetes runs else",
        ):
            prepare(
                KUBERNETES,
                TrainingJob(RunConfig(mode="allreduce", dataset=dataset), 2, (), tmp_path / "run"),
            )


def test_the_image_has_what_its_recipe_names():
    """How it is built: `hadolint launchers/Containerfile` finds no fault in it; no pod has run it."""
    text, recipe = (
        (ROOT / "launchers" / "Containerfile").read_text(),
        recipes.load("launchers", "kubernetes"),
    )
    for said in (text, (ROOT / "launchers" / "README.md").read_text()):
        assert set(re.findall(r"\bhvdtrain:([\w.-]+)", said)) == {version("hvdtrain")}
    environment = str(Path(recipe["interpreter"]).parent.parent)
    assert f"UV_PROJECT_ENVIRONMENT={environment} " in text
    assert {"g++", "make"} <= set(text.split("\nFROM ")[1].split())  # what builds Horovod
    assert (
        f"COPY --from=build {environment} {environment}" in text
        and f"WORKDIR {recipe['runs']}" in text
    )
    copied = {
        word
        for line in text.splitlines()
        if line.startswith("COPY ")
        for word in line.split()[1:-1]
    }
    assert {word for word in copied if not word.startswith(("--", "/"))} == {
        "pyproject.toml",
        "README.md",
        "hvdtrain",
        "datasets",
        "launchers",
    }
    assert all((ROOT / word).exists() for word in copied if not word.startswith(("--", "/")))
