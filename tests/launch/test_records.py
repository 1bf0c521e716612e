"""Whose job a run folder has: a process of this host, or one that a scheduler holds. Schedulers are
scripts here.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys

import pytest
from click.testing import CliRunner
from helpers import report_runs
from helpers.jobs import until

from hvdtrain.base.config import recipes
from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.launch import commands, records
from hvdtrain.launch.commands import launch, stop
from hvdtrain.launch.records import is_running, job_record_file, read_record, why_occupied
from hvdtrain.launch.status import status, status_lines
from hvdtrain.runs.folder import CONFIG


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Slurm's commands. The file `queue` says what squeue prints, and whether it succeeds; scancel
    empties it.
    """
    scripts = {
        "sbatch": "echo RUNNING > queue; echo 17",
        "squeue": '[ -f queue ] || { echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }; '
        'case "$*" in *%j) cat name 2> /dev/null || echo hvdtrain-run ;; *) cat queue ;; esac',
        "scancel": "[ ! -f deaf ] || exit 0; [ ! -f broken ] || { echo no >&2; exit 1; }; rm queue",
    }
    for name, script in scripts.items():
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\ncd {tmp_path}; {script}\n")
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(commands, "STOP_TIMEOUT_S", 0.3)
    monkeypatch.setattr(records, "LOOK_EVERY_S", 0.05)
    return tmp_path


def submit(out):
    return CliRunner().invoke(launch, ["-n", "2", "--launcher", "slurm", "--out", str(out)])


def test_a_job_in_the_queue_keeps_others_out_of_its_run_folder(slurm):
    out = slurm / "run"
    assert submit(out).exit_code == 0
    assert (
        read_record(out).items()
        >= {"launcher": "slurm", "job": "17", "name": "hvdtrain-run"}.items()
    )
    assert f"{out}: handed to slurm as job 17 since " in next(status_lines(out, out))
    again = submit(out)
    assert isinstance(again.exception, UsageError)
    assert f"--out {out}: slurm has its job 17; `hvdtrain stop {out}` ends it" in str(
        again.exception
    )
    assert read_record(out)["job"] == "17"
    (slurm / "queue").unlink()  # it has ended
    assert "not running, and not finished" in next(status_lines(out, out))
    assert submit(out).exit_code == 0


REWRITES = """
import sys
from itertools import count
from pathlib import Path
from threading import Thread
from hvdtrain.base.config import recipes
from hvdtrain.launch.records import claimed
with claimed(Path(sys.argv[1]), recipes.launcher("slurm")) as claim:
    print("claimed", flush=True)
    told_to_end = Thread(target=sys.stdin.read)
    told_to_end.start()
    for number in count():
        claim.will_hand_over(f"hvdtrain-{number}")
        if not told_to_end.is_alive():
            break
    claim.is_kept = False
"""


def test_who_holds_a_folder_is_seen_while_it_writes_its_record_again(tmp_path):
    out = tmp_path / "run"
    words = [sys.executable, "-c", REWRITES, str(out)]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout.readline() == "claimed\n"
        for looks in range(100):
            with records._locked(out):
                assert is_running(out, read_record(out)), f"after {looks} looks"
        process.stdin.close()
        assert process.wait(timeout=60) == 0
    assert not read_record(out)


LAUNCHES = """
import errno, fcntl, sys
from hvdtrain.launch.commands import launch
def refuse(*_):
    raise OSError(errno.ENOLCK, "No locks available")
if "no flock" in sys.argv:
    fcntl.flock = refuse
print("ready", flush=True)
for line in sys.stdin:
    try:
        launch.main(["--launcher", "slurm", "-n", "2", *line.split()], standalone_mode=False)
        print("launched", flush=True)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
"""


@pytest.mark.parametrize(
    ("resumes", "locks"), [(False, "flock"), (True, "flock"), (False, "no flock")]
)
def test_of_launches_at_one_moment_into_a_folder_one_has_it(slurm, resumes, locks):
    """Processes of their own, which are ready, again and again; also where the file system has no
    locks.
    """
    (slurm / "bin" / "sbatch").write_text(
        f"#!/bin/sh\necho RUNNING > {slurm}/queue; echo 17 | tee -a {slurm}/taken\n"
    )
    with contextlib.ExitStack() as stack:
        words, ends = (
            [sys.executable, "-c", LAUNCHES, locks],
            {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE},
        )
        ready = [stack.enter_context(subprocess.Popen(words, **ends, text=True)) for _ in range(3)]
        assert {process.stdout.readline() for process in ready} == {"ready\n"}
        for number in range(5):
            (out := slurm / f"run{number}").mkdir()
            if resumes:
                RunConfig(mode="allreduce").write(out / CONFIG, workers=2, job="x")
            for process in ready:
                process.stdin.write(f"{'--resume' if resumes else ''} --out {out}\n")
                process.stdin.flush()
            *others, winner = sorted(until_told(process) for process in ready)
            assert winner == "launched\n"
            for said in others:
                assert re.match(
                    f"UsageError --out {out}: (its job is still running|slurm has its job 17); ",
                    said,
                )
            assert read_record(out)["job"] == "17" and not list(slurm.glob("run*.launch/*.lock"))
            (slurm / "queue").unlink()
        assert (slurm / "taken").read_text().count("17") == 5


def until_told(process):
    """What it says in the end, after what sbatch has printed."""
    while (line := process.stdout.readline()) == "17\n":
        pass
    return line


def test_a_scheduler_that_does_not_answer_is_taken_to_have_its_job(slurm, monkeypatch):
    out = slurm / "run"
    submit(out)
    (slurm / "bin" / "squeue").write_text(
        "#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1\n"
    )
    assert "slurm has its job 17" in str(submit(out).exception)
    monkeypatch.setenv("PATH", str(slurm))
    assert "slurm has its job 17, unless it has ended: `squeue --noheader" in str(
        submit(out).exception
    )


def test_stop_forgets_a_job_once_the_scheduler_has(slurm):
    out = slurm / "run"
    submit(out)
    (slurm / "broken").touch()
    assert "`scancel 17` failed: no" in str(CliRunner().invoke(stop, [str(out)]).exception)
    assert read_record(out)["job"] == "17"
    (slurm / "broken").unlink()
    (slurm / "deaf").touch()
    ended = CliRunner().invoke(stop, [str(out)])
    assert isinstance(ended.exception, Failure)
    assert "`scancel 17` was done 0 s ago, and slurm has its job 17: try again" in str(
        ended.exception
    )
    assert read_record(out)["job"] == "17"
    (slurm / "deaf").unlink()
    records.secrets_file(out).touch()
    assert CliRunner().invoke(stop, [str(out)]).exit_code == 0
    assert read_record(out) == {} and not records.secrets_file(out).exists()


QSTAT = {
    "sge": "job_number:  17\njob_name:                   NAME\nscript_file:  /x/hvdtrain-run.launch/job.sge\n",
    "pbs": "Job Id: 17.here\n    Job_Name = NAME\n    Variable_List = PBS_O_X=hvdtrain-run,\n",
    "slurm": "NAME\n",
}


@pytest.mark.parametrize("launcher", sorted(QSTAT))
def test_no_job_is_ended_that_is_called_otherwise(launcher, slurm):
    """A number beside a run folder may be that of another job of this user: of one that came later,
    or a stranger's.
    """
    for tool, does in (
        ("scancel", ""),
        ("qdel", ""),
        ("squeue", "cat said"),
        ("qstat", "cat said"),
    ):
        (slurm / "bin" / tool).write_text(
            f"#!/bin/sh\ncd {slurm}\n{does or 'echo $* >> ended; : > said'}\n"
        )
        (slurm / "bin" / tool).chmod(0o755)
    out = slurm / "run"
    out.with_name("run.launch").mkdir()
    job_record_file(out).write_text(
        json.dumps({"launcher": launcher, "job": "17", "name": "hvdtrain-run"})
    )
    for called in ("thesis", "hvdtrain-run-2"):
        (slurm / "said").write_text(QSTAT[launcher].replace("NAME", called))
        stopped = CliRunner().invoke(stop, [str(out)]).exception
        assert isinstance(stopped, Failure), stopped
        assert (
            f"{launcher} calls its job 17 '{called}', and the run folder's is 'hvdtrain-run'"
            in str(stopped)
        )
        assert not (slurm / "ended").exists() and read_record(out)["job"] == "17"
    (slurm / "said").write_text(QSTAT[launcher].replace("NAME", "hvdtrain-run"))
    assert "its job has ended" in CliRunner().invoke(stop, [str(out)]).output
    assert (slurm / "ended").read_text() == "17\n"


def test_yarn_is_asked_for_the_service_that_it_was_given(slurm):
    """Whose name no other start has: not one in a folder of the same name, nor a later one in the
    same folder.
    """
    (slurm / "bin" / "yarn").write_text(f"""#!/bin/sh
cd {slurm}
case "$2" in
  -launch) [ ! -f "$3" ] || {{ echo "Service Instance dir already exists"; exit 1; }}; echo STABLE > "$3" ;;
  -status) cat "$3" 2> /dev/null || echo "not found" ;;
  -destroy) rm "$3" ;;
esac
""")
    (slurm / "bin" / "yarn").chmod(0o755)
    (slurm / "a").mkdir()
    for out in (slurm / "run", slurm / "a" / "run"):
        done = CliRunner().invoke(launch, ["-n", "2", "--launcher", "yarn", "--out", str(out)])
        assert done.exception is None, done.exception
        assert (slurm / read_record(out)["name"]).is_file() and why_occupied(out, read_record(out))
    assert CliRunner().invoke(stop, [str(slurm / "run")]).exit_code == 0
    assert [name for name in os.listdir(slurm) if name.startswith("hvdtrain-run-")] == [
        read_record(out)["name"]
    ]


SKY = """#!/bin/sh
cd {folder}
case "$1" in
  launch) touch begun; sleep {seconds}; echo UP > cluster ;;
  status) cat cluster 2> /dev/null || echo "not found" ;;
  down) echo "$3" >> down; rm -f cluster ;;
esac
"""
SUBMITTED = {  # a stub of the command that hands a job over, and its text
    "skypilot": ("sky", SKY),
    "yarn": (
        "yarn",
        SKY.replace('"$1"', '"$2"')
        .replace("launch)", "-launch)")
        .replace("status)", "-status)")
        .replace("down)", "-destroy)"),
    ),
    "slurm": (
        "sbatch",
        "#!/bin/sh\ncd {folder}; echo waits; touch begun; sleep {seconds}; "
        "echo RUNNING > queue; echo 17\n",
    ),
}


@contextlib.contextmanager
def submitting(launcher, out, seconds):
    """A `launch` whose scheduler takes so long for the job, and has begun with it."""
    name, text = SUBMITTED[launcher]
    (stub := out.parent / "bin" / name).write_text(text.format(folder=out.parent, seconds=seconds))
    stub.chmod(0o755)
    code = "import sys; sys.argv[0] = 'hvdtrain'; from hvdtrain.cli import main; main()"
    words = [
        sys.executable,
        "-Pc",
        code,
        "launch",
        "-n",
        "2",
        "--launcher",
        launcher,
        "--out",
        str(out),
    ]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            until(lambda: (out.parent / "begun").is_file())
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("ended_by", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("launcher", ["skypilot", "yarn"])
def test_a_job_whose_submission_is_cut_off_is_not_forgotten(launcher, ended_by, slurm):
    """Its cluster may come up a minute later, and costs money: no second one is begun, and `stop`
    ends it.
    """
    out = slurm / "run"
    with submitting(launcher, out, 60) as process:
        assert next(status_lines(out, out)).startswith(f"{out}: being handed to {launcher} since ")
        process.send_signal(ended_by)
        printed, _ = process.communicate(timeout=30)
    name = read_record(out)["name"]
    may_have = f"{launcher} may have its job {name}, which was being handed over"
    assert (
        process.returncode
        == {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}[ended_by]
    ), printed
    assert (
        ended_by == signal.SIGKILL
        or f"hvdtrain: {may_have}; `hvdtrain stop {out}` ends it" in printed
    )
    again = CliRunner().invoke(launch, ["-n", "2", "--launcher", launcher, "--out", str(out)])
    assert isinstance(again.exception, UsageError)
    assert f"--out {out}: {may_have}; `hvdtrain stop {out}` ends it; if it has" in str(
        again.exception
    )
    assert f"{out}: {may_have}" in next(status_lines(out, out))
    (slurm / "cluster").write_text("UP\n")
    assert "its job has ended" in CliRunner().invoke(stop, [str(out)]).output
    assert not (slurm / "cluster").exists() and (
        launcher == "yarn" or name in (slurm / "down").read_text()
    )
    assert read_record(out) == {}


def test_a_submission_that_tells_a_number_is_waited_for(slurm):
    """What it prints is all by which the job can be ended: by `stop` at once."""
    out = slurm / "run"
    with submitting("slurm", out, 3) as process:
        assert process.stdout.readline() == "waits\n"  # it hears of signals by now
        stopped = CliRunner().invoke(stop, [str(out)])
        printed, _ = process.communicate(timeout=30)
    assert stopped.exit_code == 0 and process.returncode == 143, printed
    assert f"hvdtrain: slurm has the job: `hvdtrain stop {out}` ends it" in printed
    assert not (slurm / "queue").exists() and read_record(out) == {}


def test_a_job_of_which_no_number_is_known_is_for_the_user_to_end(slurm):
    out = slurm / "run"
    with submitting("slurm", out, 60) as process:
        process.kill()
    for done in (submit(out), CliRunner().invoke(stop, [str(out)])):
        assert (
            "slurm may have its job hvdtrain-run, which was being handed over: look for it"
            in str(done.exception)
        )
    assert f"if it has ended, remove {job_record_file(out)}" in str(submit(out).exception)


def test_a_cloud_that_fails_to_start_a_job_is_asked_whether_it_has_begun(slurm):
    out = slurm / "run"
    words = ["-n", "2", "--launcher", "skypilot", "--out", str(out)]
    assert "sky is not on this machine" in str(CliRunner().invoke(launch, words).exception)
    assert read_record(out) == {}
    (stub := slurm / "bin" / "sky").write_text(SKY.format(folder=slurm, seconds="0; exit 1"))
    stub.chmod(0o755)
    assert "sky did not take the job" in str(CliRunner().invoke(launch, words).exception)
    assert read_record(out) == {}
    stub.write_text(SKY.format(folder=slurm, seconds="0; echo UP > cluster; exit 1"))
    failed = CliRunner().invoke(launch, words)
    assert "sky did not take the job" in str(failed.exception) and read_record(out)["name"]
    assert f"skypilot may have its job {read_record(out)['name']}" in failed.output


@pytest.mark.parametrize(("named", "namespace"), [("team", "team"), ("", "default")])
def test_a_job_of_kubernetes_is_looked_for_in_its_own_cluster(named, namespace, slurm):
    """Whichever cluster and namespace kubectl is set to by now."""
    (slurm / "context").write_text("one\n")
    (slurm / "namespace").write_text(named)
    (slurm / "bin" / "kubectl").write_text(f"""#!/bin/sh
cd {slurm}
case "$*" in
  "config current-context") cat context ;;
  "config view --minify --output=jsonpath={{..namespace}}") cat namespace ;;
  create*) touch job; echo mpijob.kubeflow.org/hvdtrain-run-x ;;
  "--context=one --namespace={namespace} get "*) [ -f job ] && echo x Running || {{ echo NotFound >&2; exit 1; }} ;;
  "--context=one --namespace={namespace} delete "*) rm job ;;
  *) echo NotFound >&2; exit 1 ;;
esac
""")
    (slurm / "bin" / "kubectl").chmod(0o755)
    out = slurm / "run"
    done = CliRunner().invoke(launch, ["-n", "2", "--launcher", "kubernetes", "--out", str(out)])
    assert done.exception is None, done.exception
    (slurm / "context").write_text("two\n")
    (slurm / "namespace").write_text("other")
    assert (
        why_occupied(out, read_record(out))
        == f"kubernetes has its job one,{namespace},mpijob.kubeflow.org/hvdtrain-run-x"
    )
    assert CliRunner().invoke(stop, [str(out)]).exit_code == 0
    assert not (slurm / "job").exists() and read_record(out) == {}


@pytest.mark.parametrize(
    ("launcher", "spoiled"),
    [
        ("slurm", {"job": "--me"}),
        ("slurm", {"job": "1,2"}),
        ("slurm", {"job": "17\n"}),
        ("sge", {"job": "-u *"}),
        ("sge", {"job": "*"}),
        ("kubernetes", {"job": "namespace/production"}),
        ("kubernetes", {"job": "--all"}),
        ("kubernetes", {"job": "a,b,mpijob.kubeflow.org/-A"}),
        ("kubernetes", {"job": "a,b,mpijob.kubeflow.org/x"}),
        ("kubernetes", {"job": "-x,b,mpijob.kubeflow.org/a"}),
        ("yarn", {"name": "-list"}),
        ("yarn", {"name": "others-service"}),
    ],
)
def test_a_scheduler_is_asked_for_nothing_but_a_job(launcher, spoiled, slurm):
    """Anybody may have written what stands beside a run folder."""
    for tool in ("scancel", "squeue", "qdel", "qstat", "kubectl", "yarn"):
        (slurm / "bin" / tool).write_text(f"#!/bin/sh\necho asked >> {slurm}/said\n")
        (slurm / "bin" / tool).chmod(0o755)
    job = (
        "me@a:6443/b,team,mpijob.kubeflow.org/hvdtrain-run-x2z4b"
        if launcher == "kubernetes"
        else "17"
    )
    record = {"launcher": launcher, "job": job, "name": "hvdtrain-run"}
    out = slurm / "run"
    out.with_name("run.launch").mkdir()
    job_record_file(out).write_text(json.dumps(record))
    assert read_record(out).items() >= record.items()
    job_record_file(out).write_text(json.dumps(record | spoiled))
    stopped = CliRunner().invoke(stop, [str(out)]).exception
    assert isinstance(stopped, UsageError) and "no job that `hvdtrain launch` started" in str(
        stopped
    )
    assert "not running" in next(status_lines(out, out)) and not (slurm / "said").exists()


def test_a_recipe_outside_launchers_is_given_again(slurm):
    """A run folder has its name and hash: what a folder says is where a recipe lies would be a
    stranger's to choose.
    """
    out, site = slurm / "run", slurm / "site.toml"
    shutil.copy(recipes.launcher("slurm").file, site)
    named = ["--launcher", str(site)]
    assert CliRunner().invoke(launch, ["-n", "2", *named, "--out", str(out)]).exit_code == 0
    assert json.loads(job_record_file(out).read_text())["launcher"] == "site.toml"
    for command in ([status], [stop], [launch, "-n", "2", "--out"]):
        refused = CliRunner().invoke(command[0], [*command[1:], str(out)]).exception
        assert isinstance(refused, UsageError)
        assert (
            f"{out} was launched by a recipe outside launchers/, 'site.toml': give --launcher"
            in str(refused)
        )
    assert "handed to site.toml as job 17" in CliRunner().invoke(status, [str(out), *named]).output
    assert "its job has ended" in CliRunner().invoke(stop, [str(out), *named]).output
    assert not (slurm / "queue").exists() and read_record(out) == {}
    out.mkdir()
    RunConfig(mode="allreduce").write(out / CONFIG, workers=2, job="x")
    manifest = report_runs.manifest() | {"launch": {"launcher": str(site)}}
    (out / "manifest.json").write_text(json.dumps(manifest))
    resumed = CliRunner().invoke(launch, ["--resume", "--out", str(out), "--dry-run"]).exception
    assert isinstance(
        resumed, UsageError
    ) and f"was launched with `--launcher {site}`: give these options again" in str(resumed)


def test_what_a_scheduler_prints_in_place_of_a_job_is_told(slurm):
    (slurm / "bin" / "sbatch").write_text("#!/bin/sh\necho queued: ok\n")
    ended = submit(slurm / "run")
    assert isinstance(ended.exception, Failure)
    assert f"slurm has printed 'ok', which names no job: see {slurm}/run.launch/log, " in str(
        ended.exception
    )


def test_stop_ends_no_process_that_a_stranger_has_written_down(tmp_path):
    """Nor one that has been given the number of one that ended: it does not hold the record."""
    out = tmp_path / "run"
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as mine:
        record = {"launcher": "local", "pid": mine.pid, "host": socket.gethostname()}
        job_record_file(out).parent.mkdir()
        job_record_file(out).write_text(json.dumps(record))
        assert not is_running(out, record)
        assert "its job has ended already" in str(CliRunner().invoke(stop, [str(out)]).exception)
        assert mine.poll() is None
        mine.communicate()


def test_a_job_of_another_host_is_not_taken_to_have_ended(tmp_path):
    out = tmp_path / "run"
    record = {"launcher": "ssh", "pid": os.getpid(), "host": f"not-{socket.gethostname()}"}
    job_record_file(out).parent.mkdir()
    job_record_file(out).write_text(json.dumps(record))
    assert why_occupied(out, record).startswith(
        f"a job was launched into it on not-{socket.gethostname()}"
    )
    again = CliRunner().invoke(launch, ["-n", "2", "--out", str(out)])
    assert "this host cannot tell whether it still runs" in str(again.exception)
    # which one removes if that host is gone
    assert str(job_record_file(out)) in str(again.exception)
    assert "stop it there" in str(CliRunner().invoke(stop, [str(out)]).exception)
    assert json.loads(job_record_file(out).read_text()) == record and os.listdir(tmp_path) == [
        "run.launch"
    ]


def test_a_run_folder_that_cannot_be_made_is_refused():
    """As /proc says it, and an automounter: with "no such file", as where another has just removed
    it.
    """
    made = CliRunner().invoke(
        launch, ["-n", "1", "--out", "/proc/nope/run", "--", "--mode", "single"]
    )
    assert isinstance(made.exception, UsageError)
    assert "/proc/nope/run cannot be written" in str(made.exception)
