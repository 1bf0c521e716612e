"""Jobs through a real Grid Engine of the test's own, on two hosts of the testbed."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
from helpers.forked_jobs import forked_hvdtrain
from helpers.jobs import HVDTRAIN, SETTINGS, steps, until
from helpers.nodes import leave_out, on_node, ranks_of_job, two_nodes
from helpers.recipes import script

from hvdtrain.launch import testbed

TOOLS = ("sge_qmaster", "sge_execd", "qsub", "qconf")
LIBRARIES, SHARED = "/usr/lib/gridengine", "/usr/share/gridengine"  # where Debian has them
QUEUE = """
qname all.q
hostlist @allhosts
qtype BATCH
pe_list mpi
slots 4
tmpdir /tmp
shell /bin/bash
shell_start_mode posix_compliant
notify 00:00:20
seq_no 0,[node2=1]
nsuspend 1
suspend_interval 00:05:00
priority 0
min_cpu_interval 00:05:00
processors UNDEFINED
rerun FALSE
initial_state default
"""
NONE = (
    "load_thresholds suspend_thresholds ckpt_list prolog epilog starter_method suspend_method resume_method "
    "terminate_method owner_list user_lists xuser_lists subordinate_list complex_values projects xprojects calendar"
).split()
INFINITY = [
    f"{kind}_{what}" for what in "rt cpu fsize data stack core rss vmem".split() for kind in "sh"
]
PARALLEL_ENVIRONMENT = """
pe_name mpi
slots 99
user_lists NONE
xuser_lists NONE
start_proc_args NONE
stop_proc_args NONE
allocation_rule $round_robin
control_slaves TRUE
job_is_first_task FALSE
urgency_slots min
accounting_summary FALSE
qsort_args NONE
"""


@pytest.fixture
def grid_engine(tmp_path):
    """Runs a command on node1, where Grid Engine's qmaster is, which has four slots there and on
    node2.
    """
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    leave_out(f"not installed: {', '.join(missing)}" if missing else "")
    with two_nodes(), cluster(tmp_path / "ge") as run:
        yield run


@contextlib.contextmanager
def cluster(folder):
    cell = folder / "default" / "common"
    env = os.environ | {
        "SGE_ROOT": str(folder),
        "SGE_CELL": "default",
        "LD_LIBRARY_PATH": LIBRARIES,
    }
    # daemons stay in front
    env |= {
        "SGE_QMASTER_PORT": "6444",
        "SGE_EXECD_PORT": "6445",
        "SGE_ND": "1",
    }

    def run(*words, **settings):
        return subprocess.run(
            [*on_node("node1"), *words], **SETTINGS | {"env": env, "timeout": 60} | settings
        )

    def configure(option, text):
        (folder / "new").write_text(text)
        assert (done := run("qconf", option, str(folder / "new"))).returncode == 0, done.stdout

    for made in (cell, folder / "qmaster", folder / "execd"):
        made.mkdir(parents=True)
    architecture = subprocess.run([f"{SHARED}/util/arch"], **SETTINGS).stdout.strip()
    for name in ("bin", "utilbin", "lib"):
        (folder / name).mkdir()
        (folder / name / architecture).symlink_to(LIBRARIES)
    (folder / "util").symlink_to(f"{SHARED}/util")
    (cell / "act_qmaster").write_text("node1\n")
    (cell / "bootstrap").write_text(
        f"admin_user none\ndefault_domain none\nignore_fqdn false\nsecurity_mode none\nbinary_path /usr/sbin\n"
        f"spooling_method classic\nspooling_lib libspoolc\nspooling_params {cell};{folder}/qmaster\n"
        f"qmaster_spool_dir {folder}/qmaster\nlistener_threads 2\nworker_threads 2\nscheduler_threads 1\n"
    )
    own = {
        "execd_spool_dir": f"{folder}/execd",
        "min_uid": "0",
        "min_gid": "0",
        "load_report_time": "00:00:01",
        "mailer": "/bin/true",
        "administrator_mail": "none",
    }
    with open(f"{SHARED}/default-configuration") as file:
        (folder / "configuration").write_text(changed(file.read(), own))
    for words in (
        ("spoolinit", "classic", "libspoolc", f"{cell};{folder}/qmaster", "init"),
        ("spooldefaults", "configuration", f"{folder}/configuration"),
        ("spooldefaults", "complexes", f"{SHARED}/util/resources/centry"),
        ("spooldefaults", "usersets", f"{SHARED}/util/resources/usersets"),
        ("spooldefaults", "managers", "root"),
    ):
        subprocess.run([f"{LIBRARIES}/{words[0]}", *words[1:]], env=env, check=True)
    with contextlib.ExitStack() as stack:

        def serve(node, daemon):
            log = stack.enter_context(open(folder / f"{daemon}-{node}.out", "w"))
            process = subprocess.Popen(
                [*on_node(node), daemon], env=env, stdout=log, stderr=subprocess.STDOUT
            )
            stack.callback(process.wait)
            stack.callback(process.kill)

        serve("node1", "sge_qmaster")
        until(lambda: run("qconf", "-sh").returncode == 0)
        run("qconf", "-ah", "node2")
        run("qconf", "-as", "node1")
        for node in ("node1", "node2"):
            serve(node, "sge_execd")
        scheduler = run("qconf", "-ssconf").stdout
        own = {"schedule_interval": "0:0:1", "flush_submit_sec": "1", "flush_finish_sec": "1"}
        configure("-Msconf", changed(scheduler, own | {"queue_sort_method": "seqno"}))
        configure("-Ap", PARALLEL_ENVIRONMENT)
        configure("-Ahgrp", "group_name @allhosts\nhostlist node1 node2\n")
        settings = [f"{name} NONE\n" for name in NONE] + [f"{name} INFINITY\n" for name in INFINITY]
        configure("-Aq", "".join([QUEUE, *settings]))
        until(lambda: run("qstat", "-f").stdout.count(architecture) == 2)  # both have reported
        yield run


def changed(text, values):
    """A configuration, a setting a line, with other values."""
    settings = dict(
        line.split(maxsplit=1) for line in text.splitlines() if not line.startswith("#")
    )
    return "".join(f"{name} {value}\n" for name, value in (settings | values).items())


def submit(grid_engine, out, workers, servers, *options, place=()):
    words = [
        "launch",
        "--launcher",
        "sge",
        "-n",
        str(workers),
        "-s",
        str(servers),
        "--out",
        str(out),
        *place,
    ]
    words += [
        "--network-interface",
        testbed.INTERFACE,
        "--",
        *options,
        "--width",
        "0.0625",
        "--threads",
        "1",
    ]
    done = grid_engine(*forked_hvdtrain(), *words, cwd=out.parent)
    assert done.returncode == 0 and done.stdout.strip().isdigit(), done.stdout
    return done.stdout.strip()


def taken(out, rank):
    return len(steps(out, rank)) if (out / f"metrics.rank{rank}.jsonl").is_file() else 0


def placed(out):
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["starter"], manifest["interface"]) == ("mpirun", testbed.INTERFACE)
    return {host: known["ranks"] for host, known in manifest["hosts"].items()}


@pytest.mark.hosts
@pytest.mark.timeout(240)
@pytest.mark.xdist_group("testbed")
def test_jobs_on_two_hosts_are_stopped_or_go_back_in_the_queue_go_on_and_lose_a_worker(
    grid_engine, tmp_path
):
    """mpirun's daemon on the second host is started by Grid Engine for the first job, which is
    stopped, and by ssh for the other, which is told to leave.
    """
    ring, servers = tmp_path / "a b'$(touch ran)`touch ran`:,", tmp_path / "ps-async"
    job = submit(grid_engine, ring, 2, 0, "--mode", "allreduce", "--epochs", "1000")
    until(lambda: taken(ring, 0) > 5)
    assert placed(ring) == {"node1": [0], "node2": [1]}
    grid_engine("qconf", "-mattr", "pe", "control_slaves", "FALSE", "mpi")
    endless = ["--mode", "ps-async", "--epochs", "1000", "--batch-size", "32"]
    told = submit(grid_engine, servers, 2, 1, *endless, place=["--env", "SGE_ND"])
    stopped = grid_engine(HVDTRAIN, "stop", str(ring))
    assert stopped.returncode == 0, stopped.stdout
    log = (tmp_path / f"{ring.name}.launch" / f"sge-{job}.log").read_text()
    assert f"ended by SIGTERM at step {taken(ring, 1)}" in log and "daemon failed" not in log
    assert (ring / "snapshots" / f"step-{taken(ring, 1):08}").is_dir() and not list(
        tmp_path.rglob("ran")
    )

    until(lambda: taken(servers, 1) > 5)
    grid_engine("qmod", "-sj", told)
    until(
        lambda: (
            "going on after step" in (tmp_path / "ps-async.launch" / f"sge-{told}.log").read_text()
        )
    )
    ranks = ranks_of_job(told, "JOB_ID", "OMPI_COMM_WORLD_RANK")
    assert set(ranks) == {0, 1, 2}
    ranks[2].kill()
    left = taken(servers, 1)
    until(lambda: taken(servers, 1) > left + 20)
    numbers = [row["step"] for row in steps(servers, 1)]
    assert numbers == list(range(1, len(numbers) + 1)) and placed(servers) == {
        "node1": [0, 2],
        "node2": [1],
    }
    assert len(json.loads((servers / "manifest.json").read_text())["parts"]) == 2
    secrets = tmp_path / "ps-async.launch" / "environment"
    assert secrets.exists()
    grid_engine("qdel", told)
    until(lambda: not secrets.exists())


# In place of mpirun: leaves with a rank's exit code when it is asked to.
MPIRUN = """#!/bin/bash
trap 'exit 143' USR1 USR2
echo started
for i in $(seq ${WAIT:-0}); do sleep 0.1; done
exit $CODE
"""


@pytest.mark.parametrize(
    ("signals", "state", "code", "ends", "needed"),
    [
        (signal.SIGUSR2, "dr", "0", 99, False),
        (signal.SIGUSR2, "Rq", "0", 99, True),
        (signal.SIGUSR1, "s", "0", 99, True),
        (None, "r", "143", 143, False),
        (None, "r", "7", 7, False),
    ],
)
def test_a_job_goes_back_in_the_queue_only_if_it_was_told_to_leave(
    signals, state, code, ends, needed, tmp_path, monkeypatch
):
    """Its exit code 99 says so. The signal goes to all of the job's processes at once; that of
    qdel, `dr`, is that of `qmod -rj` too, after which the job needs its secrets variables again.
    """
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mpirun").write_text(MPIRUN)
    (tmp_path / "bin" / "mpirun").chmod(0o755)
    (tmp_path / "bin" / "qstat").write_text(f"#!/bin/sh\necho ' 17 0.5 job me {state} now'\n")
    (tmp_path / "bin" / "qstat").chmod(0o755)
    (tmp_path / "pe").write_text("node1 3 all.q@node1 UNDEFINED\nnode2 1 all.q@node2 UNDEFINED\n")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    text = script("sge", tmp_path / "run")[1]
    log = tmp_path / "run.launch" / "sge-17.log"
    log.parent.mkdir()
    (secrets := log.with_name("environment")).touch()
    env = os.environ | {
        "PE_HOSTFILE": str(tmp_path / "pe"),
        "JOB_ID": "17",
        "LOGNAME": "me",
        "PE": "mpi",
        "SGE_ROOT": str(tmp_path),
        "ARC": "",
        "CODE": code,
        "WAIT": "100" if signals else "0",
    }
    job = subprocess.Popen(["bash", "-c", text], env=env, start_new_session=True)
    if signals:
        until(lambda: log.exists() and "started" in log.read_text())
        os.killpg(job.pid, signals)
    assert job.wait(20) == ends
    assert secrets.exists() == needed
