"""What each launcher would run: commands, job scripts and resources from the recipes."""

import json
import shlex
import subprocess

import pytest
import yaml
from click.testing import CliRunner

from hvdtrain.config import recipes
from hvdtrain.config.run_config import RunConfig
from hvdtrain.errors import UsageError
from hvdtrain.launch.commands import launch
from hvdtrain.launch.hosts import Host
from hvdtrain.launch.prepare import prepare
from hvdtrain.launch.recipe import JobSpec, expand

LAUNCHERS = ["kubernetes", "local", "mpi", "sge", "slurm", "srun", "ssh", "yarn"]
HOSTS = (Host("node1", 2), Host("node2", 2))
TAKE_HOSTS = ("mpi", "slurm", "srun", "ssh")
PROGRAM = ["python", "-m", "hvdtrain", "train", "--out", "a b"]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "run"


def start(launcher, out, hosts=None, **more):
    hosts = (HOSTS if launcher in TAKE_HOSTS else ()) if hosts is None else hosts
    return expand(launcher, JobSpec(4, PROGRAM, servers=1, hosts=hosts, out=out, **more))


def script(launcher, out, hosts=None, **more):
    made = start(launcher, out, hosts, **more)
    [(path, text)] = made.files.items()
    assert made.argv[-1] == str(path)
    return made.argv, text


def test_there_is_a_recipe_for_each():
    assert recipes.names("launchers") == LAUNCHERS


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("given", [(), ("-H", "node1:2,node2:2")])
def test_a_dry_run_prints_what_would_run_and_writes_nothing(launcher, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [
        "--launcher",
        launcher,
        "-n",
        "3",
        "-s",
        "1",
        *given,
        "--dry-run",
        "--",
        "--mode",
        "ps-async",
        "--steps",
        "5",
    ]
    result = CliRunner().invoke(launch, words)
    if launcher in ("ssh", "mpi") and not given:
        assert "needs hosts: give -H a:1,b:1 or --hostfile FILE" in str(result.exception)
    elif launcher == "srun" and not given:
        assert "is for use inside a Slurm allocation" in str(result.exception)
    elif launcher not in TAKE_HOSTS and given:
        assert "finds hosts itself: drop -H" in str(result.exception)
    else:
        assert result.exit_code == 0, result.exception
        assert "--mode" in result.output and "ps-async" in result.output and "{" + "ranks}" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_ssh_is_horovodrun_with_gloo(out):
    words = start("ssh", out, interface="eth0").argv
    line = shlex.join(words)
    assert words[0].endswith("/horovodrun") and "--gloo -np 4 -H node1:2,node2:2 --network-interfaces eth0" in line
    assert words[-len(PROGRAM) :] == PROGRAM
    assert "--network-interfaces" not in start("ssh", out).argv


def test_mpi_has_a_host_file_and_deals_ranks_out_over_hosts(out):
    made = start("mpi", out, survives_lost_rank=True, environment={"HVDTRAIN_OVER_TCP": "1"})
    assert list(made.files.values()) == ["node1 slots=2\nnode2 slots=2\n"]
    line = shlex.join(made.argv)
    assert "--map-by node" in line and "--runtime-options recoverable" in line and "-x HVDTRAIN_OVER_TCP" in line
    assert f"--hostfile {next(iter(made.files))}" in line
    assert "recoverable" not in start("mpi", out).argv


def test_slurms_job_is_a_shell_script_with_a_step(out):
    words, text = script("slurm", out)
    assert words[:2] == ["sbatch", "--parsable"]
    lines = text.splitlines()
    assert lines[0] == "#!/bin/bash"
    settings = {line for line in lines if line.startswith("#SBATCH")}
    assert {"#SBATCH --ntasks=4", "#SBATCH --nodes=2", "#SBATCH --nodelist=node1,node2"} < settings
    assert "#SBATCH --distribution=cyclic" in settings
    assert f"srun --kill-on-bad-exit=1 {shlex.join(PROGRAM)} || code=$?" in lines
    assert not [line for line in script("slurm", out, ())[1].splitlines() if "--nodes" in line or "--nodelist" in line]


def test_srun_starts_a_step_of_the_allocation_on_its_nodes(out):
    words = start("srun", out).argv
    assert words[:2] == ["sh", "-c"] and words[3:5] == ["node1,node2", "srun"]
    assert {"--ntasks=4", "--nodes=2", "--nodelist=node1,node2", "--distribution=cyclic", "--overlap"} < set(words)
    assert words[-len(PROGRAM) :] == PROGRAM
    assert subprocess.run(["sh", "-n", "-c", words[2]]).returncode == 0


def test_grid_engines_job_takes_its_hosts_from_the_parallel_environment(out):
    words, text = script("sge", out)
    assert words[:2] == ["qsub", "-terse"]
    assert "#$ -pe mpi 4" in text.splitlines()
    assert '"$PE_HOSTFILE" > "$hosts"' in text and '--hostfile "$hosts"' in text
    assert text.rstrip().endswith(f"-np 4 {shlex.join(PROGRAM)}")


@pytest.mark.parametrize(
    ("launcher", "line"),
    [
        ("slurm", "export HVDTRAIN_INTERFACE=ib0"),
        ("sge", "export OMPI_MCA_btl_tcp_if_include=ib0 PRTE_MCA_prte_if_include=ib0"),
        ("yarn", '"configuration": { "env": { "HVDTRAIN_INTERFACE": "ib0" } },'),
        ("kubernetes", "env: [{ name: OMPI_MCA_btl_tcp_if_include, value: \"ib0\" }, "
         "{ name: PRTE_MCA_prte_if_include, value: \"ib0\" }]"),
    ],
)  # fmt: skip
def test_jobs_of_schedulers_are_told_the_network_interface(launcher, line, out):
    assert line in [line.strip() for line in script(launcher, out, (), interface="ib0")[1].splitlines()]
    assert "INTERFACE" not in script(launcher, out, ())[1] and "if_include" not in script(launcher, out, ())[1]


def test_ranks_are_told_one_interface(tmp_path, monkeypatch):
    """Each has all that carries bytes use it: see world/network.py."""
    hosts = [Host("a", 1), Host("b", 1)]
    made = prepare("mpi", RunConfig(mode="allreduce"), 2, hosts, tmp_path / "run", check=False, interface="ib0")
    assert made.environment["HVDTRAIN_INTERFACE"] == "ib0" and "HVDTRAIN_INTERFACE" in made.argv
    monkeypatch.setenv("HVDTRAIN_INTERFACE", "ib1")
    made = prepare("mpi", RunConfig(mode="allreduce"), 2, hosts, tmp_path / "run", check=False)
    assert made.environment["HVDTRAIN_INTERFACE"] == "ib1" and "prte_if_include ib1" in shlex.join(made.argv)


@pytest.mark.parametrize("launcher", ["slurm", "sge"])
def test_job_scripts_are_valid_shell(launcher, out):
    text = script(launcher, out)[1]
    checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_yarns_service_starts_a_container_a_rank(out):
    words, text = script("yarn", out)
    assert words[:3] == ["yarn", "app", "-launch"]
    service = json.loads(text)
    [component] = service["components"]
    assert component["number_of_containers"] == 4
    command = component["launch_command"]
    assert "RANK=${COMPONENT_ID} WORLD_SIZE=4" in command
    assert "MASTER_ADDR=rank-0.${SERVICE_NAME}.${USER}.${DOMAIN}" in command
    assert command.endswith(shlex.join(PROGRAM))


# Of the MPI operator's CustomResourceDefinition, kubeflow.org/v2beta1: which fields there are, and their types.
MPI_JOB = {
    "apiVersion": str, "kind": str, "metadata": {"name": str},
    "spec": {
        "slotsPerWorker": int, "mpiImplementation": str,
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
    assert words[:3] == ["kubectl", "apply", "-f"]
    job = yaml.safe_load(text)
    fits(job, MPI_JOB)
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    assert job["spec"]["mpiImplementation"] in ("OpenMPI", "Intel", "MPICH")
    replicas = job["spec"]["mpiReplicaSpecs"]
    assert (replicas["Launcher"]["replicas"], replicas["Worker"]["replicas"]) == (1, 4)
    [launcher] = replicas["Launcher"]["template"]["spec"]["containers"]
    assert launcher["command"][-2:] == ["-np", "4"] and launcher["args"] == PROGRAM
    [worker] = replicas["Worker"]["template"]["spec"]["containers"]
    assert worker["command"] == ["/usr/sbin/sshd", "-De"]


def test_no_token_of_this_environment_reaches_a_command_line_of_another_host(out, monkeypatch):
    for name, value in {"AWS_SECRET_ACCESS_KEY": "s3cret", "MY_TOKEN": "t0ken", "OMP_NUM_THREADS": "3"}.items():
        monkeypatch.setenv(name, value)
    for launcher in ("ssh", "mpi"):
        made = start(launcher, out)
        assert "AWS_SECRET_ACCESS_KEY" not in made.environment and "MY_TOKEN" not in made.environment
        assert made.environment["OMP_NUM_THREADS"] == "3"
        assert "s3cret" not in made.dry_run_text() and "t0ken" not in made.dry_run_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--launcher", "nosuch", "-n", "1"], "unknown launcher 'nosuch': choose from kubernetes, local, mpi"),
        (["-n", "2", "-H", "a:1,b:1", "--hostfile", "x"], "exclude each other"),
        (["--launcher", "ssh", "-n", "3", "-H", "a:1,b:1"], "3 workers need 3 slots, and there are 1 on a + 1 on b"),
        (["-n", "1", "--sync-dst-dir", "/x"], "copies to hosts"),
        (
            ["-n", "3", "--", "--mode", "allreduce", "--batch-size", "2"],
            "a global batch of 2 leaves 3 workers",
        ),
        (["-n", "1", "-s", "1", "--", "--mode", "allreduce"], "has no servers"),
        (["-n", "1", "--", "--modle", "vgg16"], "No such option '--modle'"),
        (["-n", "1", "-H", "a;b:1"], "is not the name of a host"),
        (["--", "--mode", "allreduce"], "-n is missing"),
        (["-n", "1", "--", "--mode", "ps-sync"], "--mode ps-sync needs a server: add -s 1 before --"),
        (["-n", "1", "--", "--servers", "1", "--out=x"], "--servers is for launch: give -s before --"),
        (["-n", "1", "--launcher", "slurm", "--retries", "2"], "--retries is for jobs that `launch` sees to their end"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(words, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(launch, words)
    said = result.output + str(getattr(result.exception, "message", "") or result.exception)
    assert result.exit_code and says in said, said
    assert list(tmp_path.iterdir()) == []


def test_help_on_what_follows_the_dashes_is_help_on_train():
    result = CliRunner().invoke(launch, ["-n", "2", "--", "--help"])
    assert result.exit_code == 0 and result.output.startswith("Usage: hvdtrain train"), result.output


def test_a_dry_run_is_refused_where_the_job_would_be(tmp_path):
    (tmp_path / "mine").write_text("")
    result = CliRunner().invoke(launch, ["-n", "2", "--out", str(tmp_path), "--dry-run"])
    assert "is not empty: choose another folder" in str(result.exception)


@pytest.mark.parametrize(("run", "name"), [("My Run_1", "hvdtrain-my-run-1"), ("x" * 99, f"hvdtrain-{'x' * 54}")])
def test_a_jobs_name_is_one_that_every_scheduler_takes(run, name, tmp_path):
    made = expand("kubernetes", JobSpec(2, ["x"], out=tmp_path / run))
    assert yaml.safe_load(next(iter(made.files.values())))["metadata"]["name"] == name


def test_a_variable_that_there_is_not_is_named(tmp_path, monkeypatch):
    (tmp_path / "launchers").mkdir()
    (tmp_path / "launchers" / "mine.toml").write_text('title = "mine"\ncommand = ["run", "{rnaks}"]\n')
    monkeypatch.setattr(recipes, "RECIPES", tmp_path)
    try:
        with pytest.raises(UsageError, match=r"launchers/mine.toml: there is no \{rnaks\} to fill in: choose from bin"):
            expand("mine", JobSpec(1, ["x"]))
    finally:
        recipes.load.cache_clear()


def test_hosts_that_do_not_answer_are_told_all_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--launcher", "ssh", "-n", "2", "-H", "nosuch-1.invalid:1,nosuch-2.invalid:1", "--", "--mode", "allreduce"]
    result = CliRunner().invoke(launch, words)
    said = str(result.exception)
    assert isinstance(result.exception, UsageError)
    assert "nosuch-1.invalid: " in said and "nosuch-2.invalid: " in said
    assert list(tmp_path.iterdir()) == []
