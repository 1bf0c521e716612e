"""What each launcher would run: commands, job scripts and resources from the recipes."""

import dataclasses
import json
import re
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers import report_runs
from helpers.own import TEXT, written
from helpers.recipes import TAKE_HOSTS, script, start

from hvdtrain.base.config import recipes
from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import UsageError
from hvdtrain.launch.commands import launch
from hvdtrain.launch.filling import Filler
from hvdtrain.launch.hosts import Host, parse_hosts
from hvdtrain.launch.memory import rank_mb, requested_mb
from hvdtrain.launch.prepare import TrainingJob, prepare
from hvdtrain.launch.recipe import JobSpec, expand
from hvdtrain.runs.request import check, check_elastic

ROOT = Path(__file__).parent.parent.parent
LAUNCHERS = recipes.names("launchers")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "run"


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("given", ["", "-H node1:2,node2:2"])
def test_a_dry_run_prints_what_would_run_and_writes_nothing(launcher, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = (
        f"--launcher {launcher} -n 3 -s 1 {given} --dry-run -- --mode ps-async --steps 5".split()
    )
    result = CliRunner().invoke(launch, words)
    if launcher in ("ssh", "mpi") and not given:
        assert "needs hosts: give -H a:1,b:1 or --hostfile FILE" in str(result.exception)
    elif launcher == "srun" and not given:
        assert "is for use inside a Slurm allocation" in str(result.exception)
    elif launcher not in TAKE_HOSTS and given:
        assert "finds hosts itself: drop -H" in str(result.exception)
    else:
        assert result.exit_code == 0, result.exception
        assert (
            "--mode" in result.output
            and "ps-async" in result.output
            and "{" + "ranks}" not in result.output
        )
    assert list(tmp_path.iterdir()) == []


def test_hosts_mean_ssh_as_in_compare():
    result = CliRunner().invoke(launch, ["-n", "2", "-H", "node1:1,node2:1", "--dry-run"])
    assert "horovodrun --gloo -np 2 -H node1:1,node2:1 " in result.output


def test_a_run_on_hosts_goes_on_where_one_says_again(out, monkeypatch):
    """Its folder may be a stranger's, who would choose where this user's ssh goes, and what runs
    there.
    """
    out.mkdir()
    RunConfig(mode="allreduce").write(out / "config.toml", workers=2, job="x")
    launch_of = {
        "launcher": "ssh",
        "hosts": ["a:1", "b;:1"],
        "interface": "eth0",
        "folder": "/x/evil",
    }
    (out / "manifest.json").write_text(json.dumps(report_runs.manifest() | {"launch": launch_of}))
    monkeypatch.chdir(out)
    resume = ["--resume", "--out", str(out), "--dry-run"]
    for named in ([], ["--launcher", "ssh"]):
        refused = CliRunner().invoke(launch, [*named, *resume])
        words = "--launcher ssh -H 'a:1,b;:1' --sync-dst-dir /x/evil --network-interface eth0"
        assert isinstance(refused.exception, UsageError)
        assert f"{out} was launched with `{words}`: give these options again, or " in str(
            refused.exception
        )
    again = CliRunner().invoke(launch, ["-H", "a:1,b:1", *resume])
    assert (
        "horovodrun --gloo -np 2 -H a:1,b:1 " in again.output
        and "evil" not in again.output + str(again.exception)
    )
    here = CliRunner().invoke(launch, ["--launcher", "local", *resume])
    assert "mpirun" in here.output and "evil" not in here.output
    for launcher in ("skypilot", "mpi"):  # one costs money, and hosts alone mean ssh
        (out / "manifest.json").write_text(
            json.dumps(report_runs.manifest() | {"launch": {"launcher": launcher}})
        )
        for hosts in ([], ["-H", "a:1,b:1"]):
            refused = CliRunner().invoke(launch, [*hosts, *resume])
            assert isinstance(refused.exception, UsageError), refused.output
            assert (
                f"{out} was launched with `--launcher {launcher}`: give these options again, or"
                in str(refused.exception)
            )
    again = CliRunner().invoke(launch, ["--launcher", "skypilot", *resume])
    assert "sky launch --yes" in again.output
    servers = CliRunner().invoke(
        launch, ["--launcher", "local", *resume, "-s", "1", "--", "--mode", "allreduce"]
    )
    assert "--mode allreduce has no servers: drop --servers, or choose a ps- mode" in str(
        servers.exception
    )


@pytest.mark.parametrize(("hosts", "ranks_together"), [((), 3), ([Host("a", 2), Host("b", 1)], 2)])
def test_slurm_is_asked_for_the_memory_of_a_nodes_ranks_and_for_gpus_where_they_are_to_compute(
    hosts, ranks_together, tmp_path
):
    config = RunConfig(mode="ps-sync", servers=1, model="vgg16", width=1.0)
    for device in ("cuda", "auto"):
        config = dataclasses.replace(config, device=device)
        files = prepare(
            recipes.launcher("slurm"), TrainingJob(config, 2, hosts, tmp_path / "run")
        ).files
        text = files[tmp_path / "run.launch" / "job.sbatch"]
        asked = ranks_together * requested_mb(config, 2)
        assert asked > ranks_together * rank_mb(config, 2) + 2000
        assert f"#SBATCH --mem={asked}M\n" in text
        assert ("#SBATCH --gpus-per-task=1\n" in text) == (device == "cuda") == ("--gpus" in text)
    assert asked > 2 * 2000  # of weights


@pytest.mark.parametrize("job", [0, 19999, 20000, 12345678])
def test_the_port_of_the_first_rank_is_not_one_that_the_system_hands_out(job, out):
    """Linux's ip_local_port_range begins at 32768."""
    for text in (script("slurm", out)[1], start("srun", out).argv[5]):
        [sum_] = re.findall(r"\$\(\((.*)\)\)", text)
        asked = subprocess.check_output(
            ["bash", "-c", f"SLURM_JOB_ID={job}; echo $(({sum_}))"], text=True
        )
        assert 1024 < int(asked) < 32768


def test_a_user_of_a_host_is_mpiruns_to_know(out):
    hosts = parse_hosts("me@node1:2,node2:2")
    assert (
        "me@node1 slots=2\n"
        in start("mpi", out, hosts).files[out.with_name("run.launch") / "hosts"]
    )
    for launcher in ("ssh", "slurm", "srun"):
        with pytest.raises(
            UsageError,
            match=f"--launcher {launcher} takes no user in me@node1: write it into ~/.ssh",
        ):
            start(launcher, out, hosts)


@pytest.mark.parametrize(
    ("launcher", "line"),
    [
        ("slurm", "export HVDTRAIN_INTERFACE=ib0"),
        ("sge", "export OMPI_MCA_btl_tcp_if_include=ib0 PRTE_MCA_prte_if_include=ib0"),
        ("yarn", '"HVDTRAIN_INTERFACE": "ib0"'),
        ("kubernetes", '"name": "OMPI_MCA_btl_tcp_if_include",'),
    ],
)
def test_jobs_of_schedulers_are_told_the_network_interface(launcher, line, out):
    assert line in [
        line.strip() for line in script(launcher, out, (), interface="ib0")[1].splitlines()
    ]
    assert (
        "INTERFACE" not in script(launcher, out, ())[1]
        and "if_include" not in script(launcher, out, ())[1]
    )


def test_a_value_that_a_schedulers_own_line_cannot_hold_is_refused(out):
    filler = Filler("mine", {"out": 'a "$(b)'})
    assert filler.script("echo {out}\n") == "echo 'a \"$(b)'\n"
    with pytest.raises(
        UsageError, match="cannot stand in the line `#SBATCH --output={out}`: choose a name without"
    ):
        filler.script("#SBATCH --output={out}\n")


LINE_BREAKS = ["\n", "\r", "\0", "\x0b", "\x0c", "\x1b", "\x1e", "\x7f", "\x85", "\u2028", "\u2029"]


@pytest.mark.parametrize("character", LINE_BREAKS)
def test_no_value_begins_a_line_of_what_a_scheduler_reads(character, out):
    """Grid Engine takes every line that begins with `#$` for options, wherever it stands."""
    line = f"x{character}#$ -S /their/program"
    filler = Filler("mine", {"program": ["train", line], "out": line})
    for template in ("exec {program}\n", "cd {out}\n"):
        with pytest.raises(
            UsageError, match=r"would be 'x.*#\$ -S /their/program', which has a control character"
        ):
            filler.script(template)
        with pytest.raises(UsageError, match="which has a control character"):
            filler.resource({"args": template.split()[-1]})
    config = RunConfig(mode="allreduce", dataset=f"/data/{line}")
    with pytest.raises(UsageError, match="--dataset .* has a control character"):
        check(config)
    with pytest.raises(UsageError, match="which has a control character"):
        prepare(recipes.launcher("sge"), TrainingJob(config, 2, (), out))


@pytest.mark.parametrize("launcher", ["sge", "pbs", "slurm"])
def test_options_of_a_scheduler_in_a_value_are_no_line_of_the_script(launcher, out):
    program = ["#$ -S /their/program", "#PBS -q theirs", "#SBATCH --account=theirs", "{ranks}"]
    made = expand(recipes.launcher(launcher), JobSpec(4, program, out=out))
    [text] = made.files.values()
    options = [line for line in text.splitlines() if line.startswith("#")]
    without = expand(recipes.launcher(launcher), JobSpec(4, ["train"], out=out))
    assert options == [
        line for line in "".join(without.files.values()).splitlines() if line.startswith("#")
    ]


def test_kubernetes_fills_in_no_secret_of_a_pod_in_a_value(out):
    """$(NAME) in a command, its arguments or env is the value of that variable there; $$ is $."""
    program = ["train", "--dataset", "$(AWS_SECRET_ACCESS_KEY)", "$$(A) $5 $"]
    for launcher in ("kubernetes", "jobset"):
        made = expand(recipes.launcher(launcher), JobSpec(2, program, out=out, interface="$(A)"))
        [text] = made.files.values()
        assert '"$$(AWS_SECRET_ACCESS_KEY)"' in text and '"$$$$(A) $$5 $$"' in text
        assert '"value": "$$(A)"' in text and ('"$(JOB_COMPLETION_INDEX)"' in text) == (
            launcher == "jobset"
        )


def test_no_token_of_this_environment_reaches_a_command_line_of_another_host(out, monkeypatch):
    """It has what sets up libraries, and what ssh logs in with."""
    settings = {
        "OMP_NUM_THREADS": "3",
        "UCX_TLS": "tcp",
        "FI_PROVIDER": "tcp",
        "PRTE_MCA_prte_x": "1",
    }
    settings |= {"SSH_AUTH_SOCK": "/tmp/agent", "KRB5CCNAME": "KEYRING:session:me"}
    tokens = {"AWS_SECRET_ACCESS_KEY": "s3cret", "MY_TOKEN": "t0ken", "SLURM_JOB_ID": "7"}
    for name, value in (tokens | settings).items():
        monkeypatch.setenv(name, value)
    for launcher in ("ssh", "mpi"):
        made = start(launcher, out)
        # with Slurm's mpirun would take no hosts but its own
        assert not tokens.keys() & made.environment.keys()
        assert made.environment.items() >= settings.items()
        assert "s3cret" not in made.dry_run_text() and "t0ken" not in made.dry_run_text()


RESPAWN = "-n 2 -s 1 --respawn"
REFUSED = [
    (
        "--launcher nosuch -n 1",
        "unknown launcher 'nosuch': choose from jobset, kubernetes, local, mpi",
    ),
    ("-n 1 --sync-dst-dir /x", "copies to hosts"),
    ("-n 3 -- --mode allreduce --batch-size 2", "a global batch of 2 leaves 1 of 3 workers"),
    ("-n 1 -s 1 -- --mode allreduce", "has no servers"),
    ("-- --mode allreduce", "-n is missing"),
    (
        "--resume --out nothere",
        "there is no run in nothere to go on with; name the folder of one, or",
    ),
    ("-n 2 --out ", "the name of a folder cannot be empty"),
    ("-n 2 --out bad\udcff", r"--out 'bad\udcff' is not valid UTF-8: choose another name"),
    ("-n 1 -- --mode ps-sync", "--mode ps-sync needs a server: add -s 1 before --"),
    (
        "-n 1 -- --network-interface ib0",
        "--network-interface is for launch: give --network-interface bef",
    ),
    ("-n 1 -- --servers 1 --out=x", "--servers is for launch: give -s before --"),
    ("-n 1 --env NOT_SET_HERE", "--env NOT_SET_HERE: there is no variable of this name here"),
    (
        "-n 1 -- --dataset https://me:s3cret@example.org/coil",
        "--dataset has a password in its URL, which config.toml",
    ),
    ("-n 1 --launcher slurm --retries 2", "--retries is for jobs that `launch` sees to their end"),
    ("-n 2 --respawn -- --mode allreduce", "--respawn is for --mode ps-async and ps-ssp"),
    (f"{RESPAWN} -- --mode ps-async", "--respawn needs --wire zmq: torch's rpc"),
    (f"{RESPAWN} -- --mode ps-ssp --wire zmq --shares equal", "with leased shares"),
    (
        f"{RESPAWN} -H a:2 --launcher mpi -- --mode ps-ssp --wire zmq",
        "--respawn starts ranks on this machine or by ray, not those of mpi",
    ),
    ("-n 1 --elastic -- --mode ddp", "--elastic needs two workers or more"),
    (
        "-n 2 --elastic --launcher slurm -- --mode ddp",
        "--elastic is for --launcher local, ray, ssh: slurm ends all ranks",
    ),
    (
        "-n 2 --elastic -H a:2 --launcher mpi",
        "--elastic is for --launcher local, ray, ssh: mpi ends all ranks",
    ),
    (
        "-n 2 -s 1 --elastic -- --mode ps-sync",
        "--elastic is for --mode allreduce, ddp, sharded, not ps-sync",
    ),
    (
        "-n 2 --elastic -- --mode ps-sync",
        "--elastic is for --mode allreduce, ddp, sharded, not ps-sync",
    ),
    ("-n 2 --elastic -- --mode ddp --device cuda", "--elastic is for CPUs, where Gloo carries"),
    ("-n 2 --elastic -- --wait-for layer", "--elastic is not for --wait-for layer"),
    (
        "-n 2 --elastic -- --mode ddp --compression powersgd",
        "--elastic is not for --compression powersgd",
    ),
    ("-n 2 --elastic -- --local-steps 4", "--elastic is not for --local-steps"),
    ("-n 2 --elastic -- --ring-transport mpi", "--elastic is not for --ring-transport mpi"),
]


@pytest.mark.parametrize(("words", "says"), REFUSED)
def test_what_cannot_run_is_refused_before_anything_starts(words, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(launch, words.split(" "))
    said = result.output + str(getattr(result.exception, "message", "") or result.exception)
    assert result.exit_code and says in said, said
    assert list(tmp_path.iterdir()) == []


def test_an_elastic_ring_that_horovod_could_not_start_again_is_refused(monkeypatch):
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "5")
    for mode in ("allreduce", "ddp"):
        check_elastic(RunConfig(mode=mode))
    words = ["-n", "2", "--elastic", "--", "--mode"]
    sharded = CliRunner().invoke(launch, [*words, "sharded"])
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "0")
    averaged = CliRunner().invoke(launch, [*words, "allreduce"])
    for result in (sharded, averaged):
        assert "unset it, or take --mode ddp" in str(result.exception)
    check_elastic(RunConfig(mode="ddp"))


def test_help_on_what_follows_the_dashes_is_help_on_train():
    result = CliRunner().invoke(launch, ["-n", "2", "--", "--help"])
    assert result.exit_code == 0 and result.output.startswith("Usage: hvdtrain train"), (
        result.output
    )


def test_a_dry_run_is_refused_where_the_job_would_be(tmp_path):
    (tmp_path / "mine").write_text("")
    result = CliRunner().invoke(launch, ["-n", "2", "--out", str(tmp_path), "--dry-run"])
    assert "is not empty: choose another folder" in str(result.exception)


@pytest.mark.parametrize(
    ("run", "name"), [("My Run_1", "hvdtrain-my-run-1"), ("x" * 99, f"hvdtrain-{'x' * 36}")]
)
def test_a_jobs_name_is_one_that_every_scheduler_takes(run, name, tmp_path):
    made = expand(recipes.launcher("kubernetes"), JobSpec(2, ["x"], out=tmp_path / run))
    assert json.loads(next(iter(made.files.values())))["metadata"]["generateName"] == f"{name}-"
    assert len(f"{name}-abcde-worker-4095") <= 63  # a pod's, and a host's


def test_a_variable_that_there_is_not_is_named(tmp_path, monkeypatch):
    (tmp_path / "launchers").mkdir()
    (tmp_path / "launchers" / "mine.toml").write_text(
        'title = "mine"\ncommand = ["run", "{rnaks}"]\n'
    )
    monkeypatch.setattr(recipes, "RECIPES", tmp_path)
    try:
        with pytest.raises(
            UsageError,
            match=r"launchers/mine.toml: there is no \{rnaks\} to fill in: choose from bin",
        ):
            expand(recipes.launcher("mine"), JobSpec(1, ["x"]))
    finally:
        recipes.load.cache_clear()


def test_a_users_code_travels_with_the_copy_of_the_current_folder_or_is_looked_for_where_it_is(
    tmp_path, monkeypatch
):
    asked = []

    def check_hosts(hosts, required, measure):
        asked.append(required.files)
        return "", ()

    monkeypatch.setattr("hvdtrain.launch.prepare.check_hosts", check_hosts)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for folder in (here, tmp_path):
        written(folder, TEXT)
    hosts = [Host("a", 1), Host("b", 1)]
    for model, copy, there in (
        ("mine.py:build", "/tmp/copy", "/tmp/copy/mine.py"),
        ("../mine.py:build", "/tmp/copy", f"{tmp_path}/mine.py"),
        ("mine.py:build", "", f"{here}/mine.py"),
    ):
        config = RunConfig(mode="allreduce", model=model, dataset=f"{here}/mine.py:data")
        command = prepare(
            recipes.launcher("ssh"),
            TrainingJob(config, 2, hosts, tmp_path / "run", working_folder=copy),
        )
        assert f"--model {there}:build" in command.dry_run_text() and there in asked[-1]
        assert (f"{copy}/mine.py" if copy else f"{here}/mine.py") in asked[-1]
