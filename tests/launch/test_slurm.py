"""Jobs through a real Slurm: a controller, a node and an authentication service of the test's own,
on loopback.
"""

import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.fork_proxy import FIRST
from helpers.forked_jobs import forked_hvdtrain
from helpers.jobs import HVDTRAIN, SETTINGS, slow_steps, steps, until
from helpers.nodes import ranks_of_job
from helpers.slurm import cluster, cluster_on_two_nodes, output

from hvdtrain.base.config import recipes
from hvdtrain.launch import testbed
from hvdtrain.launch.job_log import first_failed
from hvdtrain.launch.recipe import JobSpec, expand

pytestmark = [pytest.mark.timeout(240), pytest.mark.hosts]
one_cluster = pytest.mark.xdist_group("slurm")  # which one process makes, for all that share it
TINY = ["--width", "0.0625", "--threads", "1"]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """The environment in which Slurm's commands find a cluster of one node with eight slots."""
    with cluster(
        tmp_path_factory.mktemp("slurm"), {socket.gethostname(): ("127.0.0.1", [])}, 8
    ) as env:
        yield env


@pytest.fixture
def slurm_on_two_nodes(tmp_path):
    """The same with two hosts of the testbed, node1 and node2, of two slots each."""
    with cluster_on_two_nodes(tmp_path) as env:
        yield env


def submit(env, out, workers, servers, *options, place=(), recipe="slurm", forked=True):
    program = forked_hvdtrain() if forked else [HVDTRAIN]
    words = [
        *program,
        "launch",
        "--launcher",
        str(recipe),
        "-n",
        str(workers),
        "-s",
        str(servers),
        "--out",
        str(out),
    ]
    words += place
    done = subprocess.run(
        [*words, "--", *options, *TINY], **SETTINGS | {"env": env}, timeout=60, cwd=out.parent
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.strip().isdigit()  # the job's number
    return done.stdout.strip()


@one_cluster
def test_a_batch_job_goes_back_in_the_queue_when_told_to_leave_goes_on_and_is_cancelled(
    slurm, tmp_path
):
    """SIGUSR1 is what Slurm sends two minutes before a job's time is over; it waits a little before
    the next run.
    """
    out = tmp_path / "A run"
    job = submit(slurm, out, 2, 0, "--mode", "allreduce", "--epochs", "1000", "--batch-size", "64")
    until(lambda: len(rows(out, 0)) > 5, 60)
    output(slurm, "scancel", "--batch", "--signal=USR1", job)
    until(lambda: output(slurm, "squeue", "-h", "-j", job, "-o", "%T") == "PENDING", 30)
    assert list((out / "snapshots").glob("step-*")) and not (out / "summary.json").exists()
    printed = (tmp_path / "A run.launch" / f"slurm-{job}.log").read_text()
    taken = len(rows(out, 1))
    until(lambda: len(rows(out, 1)) > taken + 3, 100)
    stopped = subprocess.run([HVDTRAIN, "stop", str(out)], **SETTINGS | {"env": slurm}, timeout=30)
    assert stopped.returncode == 0, stopped.stdout
    until(lambda: not output(slurm, "squeue", "-h", "-j", job), 60)
    numbers = [row["step"] for row in rows(out, 1)]
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > taken
    manifest = json.loads((out / "manifest.json").read_text())
    assert len(manifest["parts"]) == 2
    assert (manifest["starter"], manifest["workers"], manifest["servers"]) == ("srun", 2, 0)
    log = (tmp_path / "A run.launch" / f"slurm-{job}.log").read_text()
    # the second turn has added to it
    assert printed and log.startswith(printed) and len(log) > len(printed)


def run_batch_job(env, folder, rank, *more, **spec):
    """The exit code of a job whose two ranks run a line of shell, its number, and what they
    printed.
    """
    made = expand(
        recipes.launcher("slurm"),
        JobSpec(2, ["bash", "-c", rank], out=folder / "run", working_folder=str(folder), **spec),
    )
    [(script, text)] = made.files.items()
    script.parent.mkdir()
    script.write_text(text)
    env = env | made.environment | {"SLURM_CONF": env["SLURM_CONF"], "SBATCH_EXPORT": "NONE"}
    done = subprocess.run(
        [made.argv[0], "--wait", *more, *made.argv[1:]], **SETTINGS | {"env": env}, timeout=30
    )
    job = done.stdout.strip()
    return done.returncode, job, (script.parent / f"slurm-{job}.log").read_text()


@one_cluster
def test_a_batch_job_whose_rank_fails_does_not_go_back_in_the_queue(slurm, tmp_path):
    """Slurm ends the other rank, and 143 is what remains of both, as of ranks that Slurm has told
    to leave.
    """
    rank = "echo start; touch begun.$SLURM_PROCID; [ $SLURM_PROCID = 0 ] || exec sleep 60; "
    rank += "until [ -e begun.1 ]; do sleep 0.1; done; sleep 1; kill -9 $$"
    code, _, log = run_batch_job(slurm, tmp_path, rank)
    assert code == 143 and log.count("start") == 2, log  # once each
    shutil.rmtree(tmp_path / "run.launch")
    run_batch_job(slurm, tmp_path, "[ $SLURM_PROCID = 0 ] || exit 3; exec sleep 60")
    [log] = (tmp_path / "run.launch").glob("slurm-*.log")
    assert first_failed(log) == (1, 3), log.read_text()


@one_cluster
def test_a_batch_job_asks_for_what_ranks_need_and_they_have_all_of_it(slurm, tmp_path):
    """Of a whole node all cores, and where nothing of the environment is handed on, what they meet
    by and their key.
    """
    given = "$SLURM_CPUS_ON_NODE $SLURM_MEM_PER_NODE $SLURM_GPUS_ON_NODE $CUDA_VISIBLE_DEVICES"
    rank = f"echo at $MASTER_ADDR: $KEY {given}"
    needs = {"secrets": {"KEY": "k3y"}, "memory_mb": 600, "gpus": 1}
    code, job, log = run_batch_job(slurm, tmp_path, rank, "--exclusive", **needs)
    assert code == 0, log
    assert sorted(log.splitlines()) == [
        f"at {socket.gethostname()}: k3y 8 1200 2 {gpu}" for gpu in range(2)
    ]
    limit = output(slurm, "scontrol", "show", "job", job)
    # The backfill scheduler takes no limit as a year.
    assert re.search("TimeLimit=(UNLIMITED|365-00:00:00) ", limit), limit


@one_cluster
def test_the_recipe_of_a_site_runs(slurm, tmp_path):
    """The one that launchers/README.md shows, with what stands for its modules and its containers."""
    readme = (Path(recipes.launcher("slurm").file).parent / "README.md").read_text()
    [text] = re.findall(r"^```toml\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    assert '"/opt/hvdtrain/bin/python"' in text  # of the image, which is none here
    text = text.replace("/opt/hvdtrain/bin/python", sys.executable)
    (site := tmp_path / "site.toml").write_text(text)
    (container := tmp_path / "bin" / "apptainer").parent.mkdir()
    container.write_text('#!/bin/sh\necho "$1 in $4 with $MODULES"; shift 4; exec "$@"\n')
    container.chmod(0o755)
    env = slurm | {
        "PATH": f"{container.parent}:{slurm['PATH']}",
        "BASH_FUNC_module%%": "() { export MODULES=$2; }",
    }
    job = submit(
        env, tmp_path / "run", 2, 0, "--mode", "ddp", "--steps", "2", recipe=site, forked=False
    )
    until(lambda: not output(slurm, "squeue", "-h", "-j", job), 100)
    log = (tmp_path / "run.launch" / f"slurm-{job}.log").read_text()
    assert (
        log.count("exec in images/hvdtrain.sif with openmpi") == 2
        and (tmp_path / "run" / "summary.json").exists()
    )
    launched = json.loads((tmp_path / "run" / "manifest.json").read_text())["launch"]
    assert (launched["launcher"], launched["recipe"]) == (
        "site.toml",
        recipes.launcher(str(site)).digest,
    )


@pytest.mark.xdist_group("testbed")
def test_jobs_on_two_nodes_train_where_they_were_placed(slurm_on_two_nodes, tmp_path):
    """Nodes of two slots each, with their own names and slurmds. One after the other: a ring along
    the nodes; servers in blocks, as the site has it, where a worker is lost; and as -H has it,
    where Slurm itself would put two ranks on the first node.
    """
    env = slurm_on_two_nodes
    ring, asynchronous, synchronous = (
        tmp_path / mode for mode in ("allreduce", "ps-async", "ps-sync")
    )
    place = ["--network-interface", testbed.INTERFACE]
    jobs = {
        ring: submit(env, ring, 4, 0, "--mode", "allreduce", "--steps", "4", place=place),
        asynchronous: submit(
            env | {"SBATCH_DISTRIBUTION": "block", FIRST: slow_steps(0.02)},
            asynchronous,
            2,
            1,
            "--mode",
            "ps-async",
            "--steps",
            "300",
            "--batch-size",
            "32",
            place=place,
        ),
        synchronous: submit(
            env,
            synchronous,
            2,
            1,
            "--mode",
            "ps-sync",
            "--steps",
            "4",
            place=[*place, "-H", "node2:2,node1:1"],
        ),
    }
    until(lambda: len(rows(asynchronous, 1)) > 5 and len(rows(asynchronous, 2)) > 5, 100)
    ranks_of_job(jobs[asynchronous], "SLURM_JOB_ID", "SLURM_PROCID")[2].kill()
    until(lambda: not output(env, "squeue", "-h"), 100)
    placed = {
        ring: {"node1": [0, 1], "node2": [2, 3]},
        asynchronous: {"node1": [0, 1], "node2": [2]},
        synchronous: {"node1": [1], "node2": [0, 2]},
    }
    for out, expected in placed.items():
        log = (out.with_name(f"{out.name}.launch") / f"slurm-{jobs[out]}.log").read_text()
        assert (out / "summary.json").exists(), log
        manifest = json.loads((out / "manifest.json").read_text())
        assert {host: known["ranks"] for host, known in manifest["hosts"].items()} == expected
        assert (manifest["starter"], manifest["interface"]) == ("srun", testbed.INTERFACE)
        summary = json.loads((out / "summary.json").read_text())
        assert summary["lost_workers"] == ([2] if out == asynchronous else [])


def rows(out, rank):
    return steps(out, rank) if (out / f"metrics.rank{rank}.jsonl").is_file() else []


@one_cluster
def test_a_comparison_runs_inside_an_allocation(slurm, tmp_path):
    """Its threads are those of the allocation, and runs follow each other as steps of one job."""
    out = tmp_path / "c"
    words = [
        "compare",
        "--launcher",
        "srun",
        "--modes",
        "single,ddp",
        *TINY,
        "--steps",
        "4",
        "--out",
        str(out),
    ]
    command = ["salloc", "--quiet", "--ntasks=2", *forked_hvdtrain(), *words]
    done = subprocess.run(command, **SETTINGS | {"env": slurm}, timeout=150, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    host = socket.gethostname()
    for name, ranks in (("single-w1-r1", 1), ("ddp-w2-r1", 2)):
        manifest = json.loads((out / "runs" / name / "manifest.json").read_text())
        assert (manifest["starter"], manifest["processes"]) == ("srun", ranks)
        assert (manifest["launch"]["launcher"], manifest["launch"]["hosts"]) == (
            "srun",
            [f"{host}:{ranks}"],
        )
    outside = subprocess.run([HVDTRAIN, *words], **SETTINGS | {"env": slurm}, timeout=30)
    assert (outside.returncode, outside.stdout.strip()) == (
        2,
        "hvdtrain: --launcher srun is for use inside a Slurm allocation: start this in salloc or sbatch",
    )
