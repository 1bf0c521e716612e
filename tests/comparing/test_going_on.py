"""A comparison goes on in the folder of an earlier one: what stays, what is made again, and what is
refused.
"""

import contextlib
import dataclasses
import fcntl
import itertools
import json
import os
import re
import signal
import subprocess
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from helpers import report_runs
from helpers.fork_proxy import FIRST
from helpers.forked_jobs import forked_hvdtrain, forks_first
from helpers.jobs import SETTINGS, hvdtrain, slow_steps, until

from hvdtrain.base.config import recipes
from hvdtrain.base.config.run_config import RunConfig, flag
from hvdtrain.base.errors import UsageError
from hvdtrain.base.world.host import versions
from hvdtrain.comparing import earlier, grid, running
from hvdtrain.comparing.command import compare
from hvdtrain.comparing.comparison_state import ComparisonState, conducted
from hvdtrain.comparing.earlier import claimed, experiment, find_finished, match, set_aside
from hvdtrain.comparing.grid import Axes, in_rounds, plan
from hvdtrain.comparing.running import Comparison
from hvdtrain.comparing.search import Search
from hvdtrain.launch.hosts import Host
from hvdtrain.reporting.answer import RING_WINS, UNKNOWN, Answer
from hvdtrain.reporting.contenders import DEFAULT
from hvdtrain.runs.read import load_run
from hvdtrain.runs.request import with_absolute_paths

ASKED = RunConfig(steps=20, threads=1)


def planned(modes="allreduce,ps-sync", repeats=2, config=ASKED, **axes):
    return [*itertools.chain(*in_rounds(plan(config, Axes(modes.split(","), **axes)), repeats))]


def finish(folder, runs, **changed):
    """The folders of finished runs, as jobs leave them."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    for run in runs:
        made = folder / "runs" / run.name
        made.mkdir(parents=True)
        # as ranks write it down
        taken = dataclasses.replace(run.config, width=run.config.effective_width)
        with_absolute_paths(taken).write(made / "config.toml", workers=run.workers, job="1")
        config = run.config
        of = report_runs.manifest(
            config.mode, run.workers, config.servers, config.repeat, versions=versions(), **changed
        )
        (made / "manifest.json").write_text(json.dumps(of))
        (made / "summary.json").write_text(json.dumps(report_runs.summary(of)))


def kept(folder, runs):
    return sorted(match(find_finished(folder), runs, folder))


def test_finished_runs_stay_and_more_repeats_and_modes_join_them(tmp_path):
    finish(tmp_path, planned()[:3])
    names = sorted(run.name for run in planned()[:3])
    assert kept(tmp_path, planned(repeats=5)) == names
    assert kept(tmp_path, planned("single,allreduce,ps-sync")) == names
    assert kept(tmp_path, planned("ddp")) == []
    # their names have the batch in them
    many = planned(options={"batch_size": [32, 64]}, repeats=1)
    assert kept(tmp_path, many) == ["b32-allreduce-w2-r1", "b32-ps-sync-w2-s1-r1"]


def test_a_model_of_ones_own_may_be_given_by_a_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_model.py").touch()
    own = dataclasses.replace(ASKED, model="./my_model.py:build", width=1.0)
    runs = planned(config=own)
    finish(tmp_path, runs)
    assert kept(tmp_path, runs) == sorted(run.name for run in runs)


def test_sprints_and_whole_runs_of_one_contender_stand_side_by_side(tmp_path):
    [ring] = plan(ASKED, Axes(["allreduce"]))
    runs = [ring.sprint(4.0), dataclasses.replace(ring, after_sprints=True)]
    finish(tmp_path, runs)
    assert kept(tmp_path, runs) == ["allreduce-w2-r1", "allreduce-w2-t-r1"]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"steps": 30}, "they were made with --steps 20, not 30: name another folder"),
        ({"lr": 0.01, "seed": 5}, "they were made with --lr 0.0003, not 0.01; --seed 0, not 5"),
        (
            {"steps": 0, "epochs": 2},
            "they were made with --epochs auto, not 2; --steps 20, not none",
        ),
        ({"dataset": "./mine"}, "they were made with --dataset digits, not /"),
        ({"threads": 2}, "they were made with --threads 1, not 2"),
        ({"threads": 0}, "they were made with --threads 1, not auto"),
        (
            {"hosts": [Host("a", 1), Host("b", 1)]},
            "made with hosts none, not a,b; --launcher local, not ssh",
        ),
        ({"torch": "1.0"}, f"made with torch {versions()['torch']}, not 1.0"),
        ({"hvdtrain": "9.9"}, f"made with hvdtrain {version('hvdtrain')}, not 9.9"),
        ({"images": "def"}, "made with images abc, not def"),
    ],
)
def test_what_could_not_be_compared_is_one_line(changed, says, tmp_path):
    hosts, more = (
        changed.pop("hosts", []),
        {name: changed.pop(name) for name in ("torch", "hvdtrain", "images") if name in changed},
    )
    config = dataclasses.replace(ASKED, **changed)

    def ask(config, hosts, more):
        state = ComparisonState(tmp_path)
        state.set_experiment(
            experiment(config, 0.0, plan(config, Axes(["ddp"]), hosts, recipes.launcher("ssh")))
            | {"images": "abc"}
            | more
        )
        return state

    ask(ASKED, [], {}).save()
    ask(dataclasses.replace(ASKED, log_every=5), [], {})  # which changes nothing
    with pytest.raises(UsageError, match=re.escape(says)):
        ask(config, hosts, more)


def test_runs_of_the_version_that_did_not_write_itself_down_are_not_continued(tmp_path):
    asked = experiment(ASKED, 0.0, plan(ASKED, Axes(["ddp"])))
    state = ComparisonState(tmp_path)
    state.set_experiment({name: value for name, value in asked.items() if name != "hvdtrain"})
    state.save()
    with pytest.raises(UsageError, match=r"made with hvdtrain 0\.1\.0, not "):
        ComparisonState(tmp_path).set_experiment(asked)


@pytest.mark.parametrize(("threads", "counted"), [(3, 3), (-1, -1), (0, 0)])
def test_threads_that_were_given_are_known_later(tmp_path, threads, counted):
    for given in (1, threads):  # of the first, no run has finished
        config = dataclasses.replace(ASKED, threads=given)
        state = ComparisonState(tmp_path)
        asked = experiment(config, 0.0, plan(config, Axes(["ddp"])))
        state.set_experiment(asked, nothing_counts=True)
        state.save()
    assert conducted([tmp_path]).threads == counted


def test_what_was_given_is_known_later_unless_calls_differ_in_it(tmp_path):
    def given_after(given, begins=False):
        state = ComparisonState(tmp_path)
        state.note_given(given, begins)
        state.save()
        return conducted([tmp_path]).given

    nothing = dict.fromkeys(["modes", "workers", "servers", *grid.SETTINGS], "")
    zmq = nothing | {"wire": "zmq"}
    assert given_after(nothing, begins=True) == nothing
    assert given_after(zmq, begins=True) == zmq
    assert given_after(zmq) == zmq
    assert conducted([tmp_path, tmp_path]).given is None
    assert given_after(zmq | {"modes": "ddp"}) is None  # beside modes that were not named
    rings = zmq | {"modes": "ddp,allreduce"}
    assert given_after(zmq | {"modes": "ddp"}, begins=True) and given_after(rings) == rings
    assert given_after(zmq | {"modes": "ddp"}) is None
    # The file may be anybody's.
    for name, value in (("wire", "zmq; reboot"), ("wire", "--preset"), ("hosts", "evil:2")):
        assert given_after(zmq | {name: value}, begins=True) is None


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("--wire zmq --modes ddp,ps-sync", {"wire": "zmq", "modes": "ddp,ps-sync", "workers": ""}),
        ("-H a:1,b:1", {"wire": "", "modes": "", "workers": "2", "servers": ""}),
        ("--batch-size 16,32", None),
        ("--tune 1m", None),
        ("--preset stragglers", None),
    ],
)
def test_a_comparison_notes_what_was_given(words, given, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "hvdtrain.comparing.command.Comparison.run", lambda self, *_: self.state.save() or []
    )
    monkeypatch.setattr("hvdtrain.comparing.command._look_at_hosts", lambda *_: (None, 0))
    CliRunner().invoke(compare, [*words.split(), "--device", "cpu", "--out", str(tmp_path / "out")])
    noted = ComparisonState(tmp_path / "out").given
    assert noted is None if given is None else given.items() <= noted.items()


def test_runs_that_would_have_the_same_names_are_not_made_again(tmp_path):
    finish(tmp_path, planned("ps-ssp", repeats=1))
    with pytest.raises(
        UsageError,
        match=r"r1 is there already, and was made with --batch-size 32, not 64: name both values",
    ):
        kept(tmp_path, planned("ps-ssp", options={"batch_size": [64]}))
    with pytest.raises(
        UsageError,
        match=r"r1 is there already, and was made with --staleness 2, not 4: name both",
    ):
        kept(tmp_path, planned("ps-ssp", options={"staleness": [4]}))


def test_a_ring_on_one_host_is_not_the_one_over_several(tmp_path):
    hosts = [Host("a", 1), Host("b", 1)]
    axes = Axes(["single", "allreduce"], options={}, on_one_host=[2])
    runs = plan(ASKED, axes, hosts, recipes.launcher("ssh"))
    [over_both] = [run for run in runs if run.contender == "allreduce-w2"]
    launch = {"launcher": "ssh", "hosts": [str(host) for host in over_both.hosts]}
    finish(tmp_path, [over_both], launch=launch)
    assert kept(tmp_path, runs) == ["allreduce-w2-r1"]


def test_runs_of_a_version_with_other_options_are_told_and_left(tmp_path):
    [run] = planned("allreduce", 1)
    finish(tmp_path, [run])
    with (tmp_path / "runs" / run.name / "config.toml").open("a") as file:
        file.write("frob = 1\n")
    with pytest.raises(UsageError, match="unknown option in .*config.toml: 'frob'"):
        find_finished(tmp_path)


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "runs").mkdir()
    with pytest.raises(UsageError, match="is not empty"):
        find_finished(tmp_path)
    (tmp_path / "logs").mkdir()
    assert find_finished(tmp_path) == {}
    (tmp_path / "report.md").write_text("mine")
    with pytest.raises(UsageError, match="is not empty and holds no earlier report"):
        find_finished(tmp_path)


def test_what_was_begun_is_moved_out_of_the_way_and_not_while_its_job_runs(tmp_path, monkeypatch):
    with claimed(tmp_path):
        assert set_aside(tmp_path, tmp_path / "runs" / "a") is None
        for number in (1, 2):
            (tmp_path / "runs" / "a").mkdir()
            (tmp_path / "runs" / "a" / "config.toml").write_text(str(number))
            (tmp_path / "logs" / "a.log").write_text("why")
            assert (
                set_aside(tmp_path, tmp_path / "runs" / "a")
                == tmp_path / "unfinished" / f"a-{number}"
            )
            assert (tmp_path / "unfinished" / f"a-{number}" / "compare.log").read_text() == "why"
        (tmp_path / "runs" / "a").mkdir()
        monkeypatch.setattr(earlier, "KILLED_JOB_END_S", 0.3)
        with (tmp_path / "runs" / "a" / "config.toml").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # as its first worker holds it
            with pytest.raises(UsageError, match="its job is still at work there"):
                set_aside(tmp_path, tmp_path / "runs" / "a")
        with (
            pytest.raises(UsageError, match="another comparison is at work there"),
            claimed(tmp_path),
        ):
            pass


# The second run has not ended when its comparison is killed.
SECOND_IS_SLOW = f"""
import sys
if any(word.endswith("single-w1-r2") for word in sys.argv):
    exec({slow_steps(60)!r})
"""


@pytest.mark.timeout(240)
def test_a_killed_comparison_goes_on_where_it_stopped(tmp_path):
    out = tmp_path / "c"
    options = "--modes single --width 0.0625 --steps 8 --repeats 2 --out".split()
    words = ["compare", *options, str(out)]
    first, second = out / "runs" / "single-w1-r1" / "summary.json", out / "runs" / "single-w1-r2"
    slowly = SETTINGS | {"env": SETTINGS["env"] | {FIRST: SECOND_IS_SLOW}}
    with subprocess.Popen([*forked_hvdtrain(), *words], **slowly, start_new_session=True) as job:
        until((second / "manifest.json").exists)
        os.killpg(job.pid, signal.SIGKILL)
    before = first.stat()
    done = hvdtrain(*words, first=forks_first())
    assert done.returncode == 0, done.stdout
    assert (first.stat().st_ino, first.stat().st_mtime) == (before.st_ino, before.st_mtime)
    assert "there already, and left as it is: 1 run\n" in done.stdout
    assert (out / "unfinished" / "single-w1-r2-1" / "manifest.json").exists()
    assert (second / "summary.json").exists() and (out / "results.csv").read_text().count("\n") == 3


def test_ctrl_c_says_with_what_to_go_on(tmp_path, monkeypatch):
    def ctrl_c(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("hvdtrain.comparing.command.Comparison.run", ctrl_c)
    said = CliRunner().invoke(
        compare, ["--modes", "single", "--device", "cpu", "--out", str(tmp_path / "a run")]
    )
    assert (
        f"finished runs stay: the same command with --out '{tmp_path}/a run' goes on\n"
        in said.output
    )


def test_ctrl_c_amid_the_search_says_that_it_begins_again(tmp_path, monkeypatch):
    def ctrl_c(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("hvdtrain.comparing.running.Comparison._run_one", ctrl_c)
    words = ["--modes", "allreduce,ps-sync", "--device", "cpu", "--out", str(tmp_path / "run")]
    said = CliRunner().invoke(compare, words)
    assert "the search before the comparison was not over: the same command" in said.output


def test_a_script_that_was_repaired_leaves_all_else_that_runs_have_in_common(tmp_path, monkeypatch):
    """No run of the former script has finished."""

    def nothing_finishes(self, *_):
        self.state.save()
        return []

    monkeypatch.setattr("hvdtrain.comparing.command.Comparison.run", nothing_finishes)
    script = tmp_path / "train.py"
    words = ["--script", str(script), "--modes", "single", "--device", "cpu", "--repeats", "1"]
    found = []
    for content in ("1 / 0", "pass"):
        script.write_text(content)
        CliRunner().invoke(compare, [*words, "--out", str(tmp_path / "out")])
        found.append(ComparisonState(tmp_path / "out").experiment)
    before, after = found
    assert before.keys() == after.keys() and "--threads" in after
    assert [name for name in after if before[name] != after[name]] == ["script's content"]


@pytest.mark.parametrize("words", ["", "--modes single,allreduce,ps-sync --ring-transport gloo"])
def test_with_what_was_given_the_contenders_are_the_same(words, tmp_path, monkeypatch):
    """As `next` gives it. With the values of the runs, contenders have other names."""
    monkeypatch.setattr(Comparison, "_run_one", run_one_at({"": 1000}))
    out = ["--device", "cpu", "--trainings", "0", "--repeats", "2", "--out", str(tmp_path / "out")]
    CliRunner().invoke(compare, [*words.split(), *out])
    known = ComparisonState(tmp_path / "out").contenders
    given = conducted([tmp_path / "out"]).given
    named = [word for name, value in given.items() if value for word in (flag(name), value)]

    def planned_with(*more):
        said = CliRunner().invoke(compare, [*named, *more, *out, "--dry-run"]).output
        return said, set(re.findall(r"^\[\d+/\d+\] (\S+)-r\d+$", said, re.MULTILINE))

    said, names = planned_with()
    assert len(names) > 2 and names <= known.keys() and "tried first" not in said
    _, others = planned_with("--wire", "zmq")
    assert not others <= known.keys()


# What is run


def run_one_at(speeds, made=None):
    """A Comparison._run_one that starts nothing.

    Args:
        speeds: by a part of a contender's name.
        made: where the runs are noted.
    """

    def run_one(self, run, out):
        speed = next(speed for name, speed in speeds.items() if name in run.name)
        if made is not None:
            made.append(("pilot" if out.parent.parent.name == "pilot" else "runs", run.name))
        self.state.note_finished(run, speed, 9.0)
        return speed

    return run_one


def made_by(
    tmp_path,
    monkeypatch,
    speeds,
    modes="single,allreduce,ps-sync",
    sprint_s=4.0,
    answers=lambda made: [],
    until_sure=False,
    **more,
):
    """Names of the runs that a comparison makes, where contenders have these speeds; whole runs end
    in -t-rN.

    Args:
        answers: that there are after these runs.
    """
    made = []
    monkeypatch.setattr(Comparison, "_run_one", run_one_at(speeds, made))
    monkeypatch.setattr(running, "reach_answers", lambda *_: answers(made))
    contenders = plan(RunConfig(), Axes(modes.split(","), options={"wire": ["rpc", "zmq"]}))
    state = ComparisonState(tmp_path)
    repeats, wholes = more.pop("repeats", 5), more.pop("trainings", 1)
    most_repeats = more.pop("most_repeats", 0)
    job = Comparison(
        tmp_path,
        contenders,
        {},
        state,
        sprint_s,
        repeats,
        wholes,
        Search(before_whole_runs=not sprint_s),
        most_repeats=most_repeats,
    )
    assert job.run({}, until_sure=until_sure) == []
    return made


SPEEDS = {
    "single": 1500,
    "allreduce": 1100,
    "ps-sync-w2-s1-rpc": 880,
    "ps-sync-w2-s1-zmq": 1000,
    "ps-async-w2-s1-zmq": 900,
    "ps-async": 1020,
}


def test_of_whole_runs_a_search_leaves_out_the_slower_wire_alone(tmp_path, monkeypatch):
    # far behind, and trained all the same
    speeds = SPEEDS | {
        "ps-async-w2-s1-zmq": 400,
        "ps-async": 500,
    }
    made = made_by(
        tmp_path,
        monkeypatch,
        speeds,
        "allreduce,ps-sync,ps-async",
        sprint_s=0,
        repeats=2,
        trainings=0,
    )
    assert sorted(name for place, name in made[:5]) == [
        "allreduce-w2-r1",
        *(f"{mode}-w2-s1-{wire}-r1" for mode in ("ps-async", "ps-sync") for wire in ("rpc", "zmq")),
    ]
    assert [place for place, _ in made].count("pilot") == 2 * 5
    assert {name for place, name in made if place == "runs"} == {
        f"{run}-r{number}"
        for run in ("allreduce-w2", "ps-sync-w2-s1-zmq", "ps-async-w2-s1-rpc")
        for number in (1, 2)
    }


def test_a_pilot_comes_first_and_each_mathematics_is_trained_once(tmp_path, monkeypatch):
    modes = "single,allreduce,ps-sync,ps-async"
    made = made_by(tmp_path, monkeypatch, SPEEDS, modes)
    assert [place for place, _ in made].count(
        "pilot"
    ) == 2 * 5  # one machine has nothing to be chosen of
    counted = [name for place, name in made if place == "runs" and "-t-" not in name]
    assert len(counted) == 4 * 5 and not [name for name in counted if "ps-sync-w2-s1-rpc" in name]
    assert [name for _, name in made[-2:]] == ["single-w1-t-r1", "ps-async-w2-s1-rpc-t-r1"]
    more = made_by(tmp_path, monkeypatch, SPEEDS | {"ps-sync-w2-s1-rpc": 5000}, modes, repeats=1)
    assert [place for place, _ in more] == ["runs"] * 6  # what was decided stays
    left = made_by(tmp_path, monkeypatch, SPEEDS, "allreduce,ps-sync", repeats=1, trainings=0)
    assert sorted(name for _, name in left) == ["allreduce-w2-r1", "ps-sync-w2-s1-zmq-r1"]


def test_what_is_far_behind_its_family_or_one_machine_is_not_repeated_or_trained(
    tmp_path, monkeypatch, capsys
):
    speeds = {"single": 1000, "allreduce": 43, "ps-sync": 33, "ps-async": 267}
    made = made_by(
        tmp_path, monkeypatch, speeds, "single,allreduce,ps-sync,ps-async", repeats=2, trainings=2
    )
    assert not [name for place, name in made if place == "runs" and "ps-sync" in name]
    assert [name for _, name in made if "-t-" in name] == ["single-w1-t-r1", "single-w1-t-r2"]
    said = capsys.readouterr().out
    assert (
        "left out: ps-sync-w2-s1-rpc: 0.12 times the samples/s of ps-async-w2-s1-rpc, at most 0.12, in 2"
        in said
    )
    written_down = {of.run: of.why for of in conducted([tmp_path]).left_out}
    why = written_down["ps-sync-w2-s1-rpc"]
    assert why.startswith("0.12 times the samples/s of ps-async-w2-s1-rpc")


def answer(word, **quality):
    needed = {"repeats_needed": 14 if word == UNKNOWN else None}
    return Answer(word, "", [], "", [], {"quality": [quality] if quality else [], **needed})


@pytest.mark.parametrize(("known_after", "done"), [(15, 18), (19, 22), (99, 28)])
def test_repeats_end_after_the_look_at_which_the_answer_is_known(
    known_after, done, tmp_path, monkeypatch
):
    def answers(made):
        return [answer(RING_WINS if len(made) >= known_after else UNKNOWN)]

    modes = "single,ps-sync"
    made = made_by(
        tmp_path, monkeypatch, SPEEDS, modes, 0.0, answers, True, repeats=10, trainings=0
    )
    assert len(made) == done and not any("-t-" in name for _, name in made)


@pytest.mark.parametrize(
    ("modes", "known_at", "repeats"),
    [
        ("single,ps-sync", 5, 5),
        ("single,ps-sync", 7, 7),
        ("single,ps-sync", 99, 10),
        # Runs take 9 s: three repeats more of four contenders would take too long.
        ("single,allreduce,ps-sync,ps-async", 99, 7),
    ],
)
def test_where_the_answer_is_not_known_more_repeats_follow_that_take_little_time(
    modes, known_at, repeats, tmp_path, monkeypatch
):
    def answers(made):
        is_known = any(name.endswith(f"-r{known_at}") for _, name in made)
        return [answer(RING_WINS if is_known else UNKNOWN)]

    made = made_by(
        tmp_path, monkeypatch, SPEEDS, modes, answers=answers, trainings=0, most_repeats=10
    )
    sprints = Counter(name.rsplit("-r", 1)[0] for place, name in made if place == "runs")
    assert set(sprints.values()) == {repeats}


def test_one_contender_alone_does_not_keep_until_sure_going(tmp_path, monkeypatch, capsys):
    alone = dataclasses.replace(answer(UNKNOWN), compares=False)
    made = made_by(
        tmp_path,
        monkeypatch,
        SPEEDS,
        "single",
        0.0,
        lambda made: [alone],
        True,
        repeats=10,
        trainings=0,
    )
    assert (
        len(made) == 5 and "there is nothing to compare after 5 repeats" in capsys.readouterr().out
    )


def test_a_comparison_of_which_one_part_is_a_contender_alone_ends_with_the_other(
    tmp_path, monkeypatch
):
    alone = dataclasses.replace(answer(UNKNOWN), compares=False)

    def answers(made):
        return [alone, answer(RING_WINS if len(made) >= 2 * 7 else UNKNOWN)]

    made = made_by(
        tmp_path,
        monkeypatch,
        SPEEDS,
        "single,allreduce",
        0.0,
        answers,
        True,
        repeats=20,
        trainings=0,
    )
    assert len(made) == 2 * 7


@pytest.mark.parametrize(
    ("said", "second"),
    [
        (answer(UNKNOWN, state="not shown", n=1), ["single-w1-t-r2", "ps-async-w2-s1-rpc-t-r2"]),
        (answer(UNKNOWN, state="not shown", n=2), []),
        (answer(UNKNOWN), []),  # it is speed that is open
        (answer(RING_WINS, state="as good", n=1), []),
    ],
)
def test_a_second_training_is_made_where_the_answer_hangs_on_it(
    said, second, tmp_path, monkeypatch
):
    modes = "single,allreduce,ps-async"
    made = made_by(
        tmp_path, monkeypatch, SPEEDS, modes, answers=lambda made: [said], repeats=7, trainings=None
    )
    assert [name for _, name in made if name.endswith("-t-r2")] == second
    contenders = plan(RunConfig(), Axes(modes.split(",")))
    asked_for = Comparison(tmp_path, contenders, {}, ComparisonState(tmp_path), 4.0, 7, 1, Search())
    assert asked_for.possible_whole_runs() == []  # --trainings 1


def test_ranks_get_the_variables_that_are_named(tmp_path, monkeypatch):
    def stop(launcher, job, **more):
        raise UsageError(f"ranks get {job.secrets}")

    monkeypatch.setattr(running, "prepare", stop)
    monkeypatch.setattr(running, "fork_server", lambda log, meanwhile: contextlib.nullcontext(""))
    monkeypatch.setenv("MY_TOKEN", "t0ken")
    words = ["--modes", "single", "--device", "cpu", "--out", str(tmp_path / "run"), "--env"]
    assert "ranks get {'MY_TOKEN': 't0ken'}" in str(
        CliRunner().invoke(compare, [*words, "MY_TOKEN"]).exception
    )
    unset = CliRunner().invoke(compare, [*words, "NOT_SET_HERE"]).exception
    assert "--env NOT_SET_HERE: there is no variable of this name here" in str(unset)


def test_a_run_that_fails_is_told_at_once_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Comparison, "_finish", lambda *_: "exit code 1: no output")
    contenders = plan(RunConfig(steps=3), Axes(["single", "allreduce"]))
    for free, said in (
        (2**30, "exit code 1: no output\n"),
        (2**10, "exit code 1: no output; the disk is full\n"),
    ):
        monkeypatch.setattr("shutil.disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        failed = Comparison(tmp_path, contenders, {}, ComparisonState(tmp_path), 0.0, 1, 0).run({})
        assert sorted(failed) == ["allreduce-w2-r1", "single-w1-r1"]
        assert capsys.readouterr().out.count(said) == 2


def test_a_host_that_goes_down_fails_the_runs_on_it_and_not_the_comparison(
    tmp_path, monkeypatch, capsys
):
    def no_route(launcher, job, **more):
        raise UsageError("b: no route to host")

    monkeypatch.setattr(running, "prepare", no_route)
    contenders = plan(
        RunConfig(steps=3),
        Axes(["ddp", "allreduce"]),
        [Host("a", 1), Host("b", 1)],
        recipes.launcher("ssh"),
    )
    first = Comparison(tmp_path, contenders, {}, ComparisonState(tmp_path), 0.0, 1, 0)
    with pytest.raises(UsageError, match="no route to host"):  # nothing has worked yet
        first.run({})
    later = Comparison(tmp_path, contenders, {}, ComparisonState(tmp_path), 0.0, 1, 0)
    later.progress.started += 1
    assert sorted(later.run({})) == ["allreduce-w2-r1", "ddp-w2-r1"]
    assert capsys.readouterr().out.count("FAILED: b: no route to host") == 2


@pytest.mark.parametrize("name", ["", "runs", "pilot"])
def test_a_folder_in_which_others_may_write_is_no_comparisons(name, tmp_path):
    with claimed(tmp_path / "c"):
        pass
    folder = tmp_path / "c" / name
    folder.mkdir(exist_ok=True)
    folder.chmod(0o777)
    with pytest.raises(UsageError, match="other users may write in"), claimed(tmp_path / "c"):
        pass


def test_a_sprint_beside_other_work_is_set_aside_for_that_alone_and_run_again(
    tmp_path, monkeypatch, capsys
):
    busy = {"a": {"cores": 2, "others_cores": 0.8, "stolen_share": 0.0}}
    # the second sprint, and once more when it is run again
    disturbed = iter([False, True, True, False])

    def finish(self, run, out, show):
        load = busy if next(disturbed) else {}
        report_runs.write(tmp_path / "made", run.config.mode, run.workers, load=load).rename(out)
        return load_run(out)

    monkeypatch.setattr(Comparison, "_finish", finish)
    contenders = plan(RunConfig(), Axes(["single", "allreduce"]))
    (tmp_path / "runs").mkdir()
    job = Comparison(tmp_path, contenders, {}, ComparisonState(tmp_path), 4.0, 1, 0)
    assert job.run({}) == []
    [name] = {path.name[: -len("-1")] for path in (tmp_path / "disturbed").iterdir()}
    assert sorted(path.name for path in (tmp_path / "disturbed").iterdir()) == [
        f"{name}-1",
        f"{name}-2",
    ]
    both = {"single-w1-r1", "allreduce-w2-r1"}
    assert {path.name for path in (tmp_path / "runs").iterdir()} == both
    assert job.progress.started == 4 and set(job.progress.finished) == both
    assert "1 sprint beside other work: set aside, and run again" in capsys.readouterr().out
    assert (
        ComparisonState(tmp_path).disturbed == [f"{name}: a had 0.8 of 2 cores busy otherwise"] * 2
    )
    assert conducted([tmp_path]).disturbed == 2


def test_runs_are_counted_with_those_that_are_run_again(tmp_path, monkeypatch, capsys):
    busy = {"a": {"cores": 2, "others_cores": 0.8, "stolen_share": 0.0}}
    loads = iter([busy, busy, {}, {}])

    def finish(self, run, out, show):
        report_runs.write(tmp_path / "made", run.config.mode, run.workers, load=next(loads)).rename(
            out
        )
        return load_run(out)

    monkeypatch.setattr(Comparison, "_finish", finish)
    (tmp_path / "runs").mkdir()
    contenders = plan(RunConfig(), Axes(["single", "allreduce"]))
    assert Comparison(tmp_path, contenders, {}, ComparisonState(tmp_path), 4.0, 1, 0).run({}) == []
    assert re.findall(r"^\[(\d)/(\d)\]", capsys.readouterr().out, re.M) == [
        ("1", "2"),
        ("2", "2"),
        ("3", "4"),
        ("4", "4"),
    ]


def test_other_work_that_does_not_end_ends_in_sprints_that_count_as_they_are(tmp_path, monkeypatch):
    def finish(self, run, out, show):
        load = {"a": {"cores": 2, "others_cores": 2.0, "stolen_share": 0.0}}
        out.parent.mkdir(exist_ok=True)
        report_runs.write(tmp_path / "made", run.config.mode, run.workers, load=load).rename(out)
        return load_run(out)

    monkeypatch.setattr(Comparison, "_finish", finish)
    contenders = plan(RunConfig(), Axes(["single", "allreduce"]))
    job = Comparison(tmp_path, contenders, {}, ComparisonState(tmp_path), 4.0, 3, 0)
    assert job.run({}) == [] and job.progress.started == 2 * 6
    assert (
        len(list((tmp_path / "runs").iterdir()))
        == len(list((tmp_path / "disturbed").iterdir()))
        == 6
    )
    later = Comparison(
        tmp_path, plan(RunConfig(), Axes(["ddp"])), {}, ComparisonState(tmp_path), 4.0, 3, 0
    )
    # fewer than were set aside before: none is now
    assert later.run({}) == [] and later.progress.started == 3


def test_what_fails_for_two_contenders_alike_before_anything_works_ends_the_comparison(
    tmp_path, monkeypatch, capsys
):
    reasons = iter(
        f"rank {rank} failed: a.png is damaged (see logs/rank.{rank}.err)" for rank in range(9)
    )
    monkeypatch.setattr(Comparison, "_finish", lambda *_: next(reasons))
    contenders = plan(RunConfig(steps=3), Axes(["single", "allreduce", "ddp", "ps-sync"]))
    job = Comparison(tmp_path, contenders, {}, ComparisonState(tmp_path), 0.0, 1, 0)
    assert len(job.run({})) == 2 and "a.png is damaged" in job.progress.shared_reason
    later = ComparisonState(tmp_path)
    # where nothing has finished, other options may be tried
    later.set_experiment({"--skip-bad": "yes"}, nothing_counts=True)
    later.set_experiment({"--skip-bad": "no"}, nothing_counts=True)
    with pytest.raises(UsageError, match="--skip-bad no, not yes"):
        later.set_experiment({"--skip-bad": "yes"})


def test_where_all_sprints_of_the_search_fail_a_later_call_tries_all_settings(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(Comparison, "_finish", lambda *_: "rank 0 failed: too short")
    config = RunConfig()
    requested = plan(config, Axes(["allreduce", "ps-sync"], options={"wire": ["rpc", "zmq"]}))
    added = plan(config, Axes(["ddp"]))
    contenders = [*requested, *(dataclasses.replace(run, is_extra=True) for run in added)]
    state = ComparisonState(tmp_path)
    job = Comparison(tmp_path, contenders, {}, state, 1.0, 5, 0, Search())
    assert len(job.run({})) == 2
    assert job.progress.shared_reason == "rank 0 failed: too short"
    assert not any(map(state.was_tried, contenders))


def test_until_sure_needs_as_many_repeats_as_a_verdict():
    result = CliRunner().invoke(compare, ["--until-sure", "--repeats", "4"])
    assert str(result.exception) == "--until-sure with --repeats 4: no answer is known before 5"


def test_what_has_finished_is_answered_and_an_empty_folder_is_not(tmp_path):
    assert running.reach_answers(find_finished(tmp_path).values(), DEFAULT) == []
    finish(tmp_path, planned(repeats=2))
    [said] = running.reach_answers(find_finished(tmp_path).values(), DEFAULT)
    assert not said.is_known and "about 5 repeats would tell" in said.because
