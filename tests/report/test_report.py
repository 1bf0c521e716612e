"""The report's files: what is read, what is written, and the command."""

import csv
import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers.foretold import FORETELLS_LITTLE, foretell_little
from helpers.jobs import ENV
from helpers.page import Page
from helpers.report_runs import manifest, steps, summary, write, write_comparison, write_report
from hypothesis import example, given
from hypothesis import strategies as st

from hvdtrain.base.console import Console
from hvdtrain.base.errors import UsageError
from hvdtrain.comparing.report_command import report
from hvdtrain.reporting import check_out, page, plots
from hvdtrain.reporting.answer import reach_answer
from hvdtrain.reporting.content import collect
from hvdtrain.reporting.table import print_table, words_table
from hvdtrain.runs.read import find_runs, load_run

PLOTS = {"ratios", "step-time", "learning"}  # of workers as many in all modes


one_report = pytest.mark.xdist_group("report")  # which one process makes, for all tests of it


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A comparison of three repeats, one failed run and one killed one, with its report beside the
    runs.
    """
    root = write_comparison(tmp_path_factory.mktemp("comparison"))
    write(root / "runs", "allreduce", 4, status="failed")
    (write(root / "runs", "ps-sync", 4, 1) / "summary.json").unlink()
    write_report([root], root)
    return root


@pytest.fixture
def undrawn(monkeypatch):
    """Reports without plots, for tests of what is beside them: to draw takes most of a report's
    time.
    """
    monkeypatch.setattr(plots, "draw", lambda answered: ([], []))


@pytest.fixture(autouse=True)
def little(monkeypatch):
    foretell_little(monkeypatch)


def drawn_of(folder):
    return plots.draw(collect(find_runs([folder])).comparisons)


@one_report
def test_a_notebooks_backend_is_no_matter(tmp_path, written):
    """A notebook's commands, as `!hvdtrain report`, inherit a backend that may not be installed."""
    env = ENV | {"MPLBACKEND": "module://not_installed.backend_inline"}
    words = ["report", str(written / "runs"), "--out", str(tmp_path / "report")]
    code = f"{FORETELLS_LITTLE}from hvdtrain.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *words], env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "<svg" in (tmp_path / "report" / "report.html").read_text(encoding="utf-8")


# What is read


def test_finds_a_run_a_folder_of_runs_and_a_comparison_each_run_once(tmp_path):
    write_comparison(tmp_path, repeats=[1])
    (tmp_path / "runs" / ".unfinished").mkdir()
    (tmp_path / "runs" / "notes").mkdir()
    one = tmp_path / "runs" / "single-w1-s0-r1"
    assert [r.name for r in find_runs([one])] == ["single-w1-s0-r1"]
    kinds = ["one process, 2 cores", "allreduce ×2", "ps-sync ×2+1", "ps-async ×2+1"]
    assert [r.kind.label for r in find_runs([tmp_path / "runs"])] == kinds
    assert [r.kind.label for r in find_runs([tmp_path, one / ".." / one.name])] == kinds


@pytest.mark.parametrize(
    "spoil, said",
    [
        (lambda f: (f / "manifest.json").unlink(), "it has no manifest.json"),
        (
            lambda f: (f / "manifest.json").write_text('{"mode": "sin'),
            "its manifest.json cannot be read",
        ),
        (
            lambda f: (f / "manifest.json").write_bytes(b"\xff\xfe\x00"),
            "its manifest.json cannot be read",
        ),
        (lambda f: (f / "manifest.json").write_text("[]"), "its manifest.json holds no object"),
        (
            lambda f: (f / "manifest.json").write_text(json.dumps(manifest(mode="\x1b[2J"))),
            r"Expected `str` matching regex .* at `\$.mode`",
        ),
    ],
)
def test_a_run_that_cannot_be_told_is_refused_by_itself_and_noted_among_others(
    tmp_path, spoil, said
):
    write(tmp_path, "allreduce", 2)
    folder = write(tmp_path, "single")
    spoil(folder)
    with pytest.raises(UsageError, match=said):
        load_run(folder)
    content = collect(find_runs([tmp_path]))
    assert len(content.rows) == 1
    assert re.search(said, content.omitted[0])


@pytest.mark.parametrize(
    ("of_one", "of_workers", "said"),
    [
        ({}, {}, "2 workers on one host of 2 cores"),
        ({}, {"slow": {"asked": "1:4x"}}, "2 workers on one host of 2 cores; --slow 1:4x"),
        ({"device": "cuda"}, {}, "2 workers on one host of 2 cores, and one process on its GPU"),
        ({"device": "cuda"}, {"device": "cuda"}, "2 workers on one host of GPUs"),
        (
            {"device": "cuda", "share_gpu": True},
            {"device": "cuda", "share_gpu": True},
            "2 workers on one host of 1 GPU, which workers share",
        ),
    ],
)
def test_the_subject_of_an_answer_says_who_computed_on_what(of_one, of_workers, said, tmp_path):
    hardware = {"cpu": "A CPU", "cores": 2, "hosts": ["one"], "gpus": ["H100"] if of_one else []}
    write(tmp_path, change=of_one | {"hardware": hardware})
    write(tmp_path, "allreduce", 2, change=of_workers | {"hardware": hardware})
    assert f"; {said}\n" in collect(find_runs([tmp_path])).first_screen()


def test_paths_without_a_run_are_refused(tmp_path):
    with pytest.raises(UsageError, match="there is no folder"):
        find_runs([tmp_path / "nowhere"])
    with pytest.raises(UsageError, match="no run in"):
        find_runs([tmp_path])
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is not a folder"):
        find_runs([tmp_path / "file"])


@pytest.mark.parametrize(
    "broken", ['{"status": "done", "wall', '{"status": "done", "wall_s": "long"}', "null"]
)
def test_a_broken_summary_is_a_run_with_a_problem(tmp_path, broken):
    folder = write(tmp_path)
    (folder / "summary.json").write_text(broken)
    assert "has not finished" in load_run(folder).problem


@one_report
def test_failed_and_killed_runs_are_noted_and_not_in_the_tables(written):
    rows = list(csv.DictReader((written / "results.csv").read_text().splitlines()))
    assert {row["workers"] for row in rows} == {"1", "2"}
    for name in ("report.md", "report.html"):
        text = (written / name).read_text()
        assert "allreduce-w4-s0-r1: left out, the run ended with status" in text
        assert (
            "ps-sync-w4-s1-r1: left out, the run has not finished: it has no summary.json" in text
        )


def test_without_a_finished_run_there_is_no_report(tmp_path):
    write(tmp_path, status="failed")
    with pytest.raises(UsageError, match="no finished run to report: single-w1-s0-r1: left out"):
        write_report([tmp_path], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_half_a_line_of_a_killed_rank_is_left_out_and_noted(tmp_path):
    folder = write(tmp_path, "allreduce", 2)
    broken = folder / "metrics.rank1.jsonl"
    broken.write_text(broken.read_text()[:-40])
    ranks, notes = load_run(folder).read_steps()
    assert [len(ranks["rank0"]), len(ranks["rank1"])] == [30, 29]
    assert notes == [f"{folder.name}: unreadable lines of metrics.rank1.jsonl left out: 1"]
    broken.unlink()
    _, notes = load_run(folder).read_steps()
    assert notes == [
        f"{folder.name}: the steps of some workers are missing: there is no metrics.rank1.jsonl"
    ]
    done = CliRunner().invoke(report, [str(folder), "--png", str(tmp_path / "png")])
    assert (
        done.exit_code == 0 and done.output.splitlines()[-1] == f"not in the plots: {notes[0]}"
    ), done.output


def test_one_process_alone_is_one_worker_in_the_first_line(tmp_path):
    """One with a part of its machine is no contender, so that no other tells how many workers there
    were.
    """
    folder = write(tmp_path, change={"threads_per_worker": 1})
    assert "; 1 worker on one host" in CliRunner().invoke(report, [str(folder)]).output


# The files


@one_report
def test_the_page_is_well_formed_and_needs_no_other_file(written):
    text = (written / "report.html").read_text()
    parsed = Page(text)
    assert parsed.fetched == []
    assert not re.search(r"https?:|@import|url\((?!#)", text)
    assert len(parsed.ids) == len(set(parsed.ids))
    for reference in re.findall(r'(?:href="#|url\(#)([^")]+)', text):
        assert reference in parsed.ids
    assert "script" not in parsed.elements
    assert parsed.elements.count("svg") == len(PLOTS)
    assert "NOT YET KNOWN" in parsed.text
    assert "prefers-color-scheme: dark" in text and "@media print" in text


HOSTILE = "<script>alert(1)</script>"


def test_text_from_files_is_escaped_everywhere(tmp_path):
    change = {
        "dataset": HOSTILE,
        "model": '"><img src=x onerror=alert(1)>',
        "starter": "x\nrm -rf ~ `y` ```",
        "backend": "|a|",
        "versions": {HOSTILE: HOSTILE},
        "hardware": {"cpu": "\n```\n# heading", "hosts": [HOSTILE], "gpus": []},
    }
    for kind in (("single",), ("allreduce", 2)):
        write(tmp_path, *kind, change=change)
    write_report([tmp_path], tmp_path / "out")
    parsed = Page((tmp_path / "out" / "report.html").read_text())
    assert not {"script", "img"} & set(parsed.elements)
    assert HOSTILE in parsed.text
    markdown = (tmp_path / "out" / "report.md").read_text()
    # our own
    outside = re.sub(r"^</?(details|summary)>|</summary>$", "", markdown, flags=re.MULTILINE)
    assert "<" not in outside and "\nrm" not in markdown
    assert "# heading" in markdown and "\n# heading" not in markdown


@one_report
def test_a_report_is_the_same_to_the_byte_and_touches_only_its_own_files(written, tmp_path):
    (tmp_path / "mine.txt").write_text("kept")
    write_report([written], tmp_path)
    files = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    assert len(files) == 5 + len(PLOTS)
    for path in files - {Path("mine.txt")}:
        assert (tmp_path / path).read_bytes() == (written / path).read_bytes()
    # Runs of one kind leave no plot of ratios behind.
    (tmp_path / "plots" / "mine.svg").write_text("kept")
    write_report([written / "runs" / "single-w1-s0-r1"], tmp_path)
    assert not (tmp_path / "plots" / "ratios.svg").exists()
    assert "ratios.svg" not in (tmp_path / "report.md").read_text()
    assert (tmp_path / "plots" / "mine.svg").read_text() == "kept"
    assert (tmp_path / "mine.txt").read_text() == "kept"


def test_unfair_runs_leave_an_earlier_report_as_it_was(tmp_path, undrawn):
    root = write_comparison(tmp_path / "a", repeats=[1])
    write_report([root], tmp_path / "out")
    before = (tmp_path / "out" / "results.csv").read_bytes()
    write(root / "runs", "ddp", 2, change={"lr": 0.1})
    with pytest.raises(UsageError, match="lr differs"):
        write_report([root], tmp_path / "out")
    assert (tmp_path / "out" / "results.csv").read_bytes() == before


def test_runs_without_steps_or_with_nan_make_a_report_all_the_same(tmp_path):
    bare = {
        "evaluations": [],
        "step_seconds": {},
        "time_to_target_s": None,
        "bytes_sent_per_step": None,
    }
    folder = write(tmp_path, "allreduce", 2, val_loss=math.nan, val_accuracy=None, **bare)
    for path in folder.glob("metrics.*"):
        path.unlink()
    write_report([tmp_path], tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text()
    assert "the loss became NaN: allreduce ×2" in text
    assert "there is no metrics.rank0.jsonl, metrics.rank1.jsonl" in text
    assert "![" not in text


def test_a_loss_that_became_nan_or_infinite_is_drawn_as_far_as_it_goes(tmp_path):
    folder = write(tmp_path, val_loss=math.nan)
    lines = [
        step | {"loss": [math.nan, math.inf][n % 2]}
        for n, step in enumerate(steps(manifest(), 30, 100.0))
    ]
    (folder / "metrics.rank0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    drawn, _ = drawn_of(folder)
    assert "learning" in {plot.name for plot in drawn}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=5,
)


SOME_MANIFEST = manifest("ps-async", 2, 1)
SOME_SUMMARY = summary(SOME_MANIFEST, histogram={"0": 1})


@given(
    st.dictionaries(
        st.sampled_from(sorted(SOME_MANIFEST) + sorted(SOME_SUMMARY)),
        json_values,
        min_size=1,
        max_size=3,
    )
)
@example({"target_accuracy": None})
@example({"parameters": None})
def test_whatever_stands_in_a_run_folder_there_is_a_report_or_one_line(tmp_path_factory, changed):
    root = tmp_path_factory.mktemp("any")
    for mode in ("ps-async", "ps-sync"):
        folder = root / mode
        folder.mkdir()
        for name, values in (
            ("manifest", SOME_MANIFEST | {"mode": mode}),
            ("summary", SOME_SUMMARY),
        ):
            values = values | {k: v for k, v in changed.items() if k in values}
            (folder / f"{name}.json").write_text(json.dumps(values))
    try:
        content = collect(find_runs([root]), reference="cnn-mnist")
        text = content.markdown([])
        Page(page.html(text, [], content.colours, content.title))
        content.show(Console(file=io.StringIO()))
    except UsageError as error:
        assert str(error)


# The command


def invoke(*arguments):
    result = CliRunner().invoke(report, list(map(str, arguments)))
    if isinstance(result.exception, UsageError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_pictures_are_written_on_request(tmp_path):
    root = write_comparison(tmp_path / "a", repeats=[1])
    invoke(root, "--png", tmp_path / "png")
    pictures = {path.stem: path.read_bytes()[:4] for path in (tmp_path / "png").iterdir()}
    assert set(pictures) == PLOTS and set(pictures.values()) == {b"\x89PNG"}
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write pictures to --png"):
        invoke(write(tmp_path), "--png", tmp_path / "file" / "below")


@one_report
def test_the_page_begins_with_the_answer_and_folds_away_what_it_rests_on(written):
    text = (written / "report.md").read_text()
    order = [
        "# NOT YET KNOWN\n",
        "**because** ",
        " ahead, ",
        "**but** ",
        "**next, ",
        " min** `hvdtrain compare ",
        "busiest |",
        "### Samples/s beside the ring",
        "### Where a step's",
        "## What it costs",
        "<summary>What was equal",
        "## To paste\n\n````markdown\n# NOT YET KNOWN\n",
    ]
    places = [text.index(part) for part in order]
    assert places == sorted(places) and places[0] == 0


@one_report
def test_the_terminal_ends_with_the_answer_that_verdict_json_has(written, tmp_path):
    out = invoke(written, "--json", tmp_path / "v.json").splitlines()
    verdict = json.loads((tmp_path / "v.json").read_text())
    flips = verdict.pop("flips")  # which commands add
    assert verdict == json.loads((written / "verdict.json").read_text())
    assert (verdict["answer"], verdict["speed"]["n"], verdict["margin"]) == (
        "NOT YET KNOWN",
        3,
        0.05,
    )
    assert len(out) <= 25
    told = [
        ("because", verdict["because"]),
        *(("but", but) for but in verdict["but"]),
        ("forecast", flips["says"]),
    ]
    assert out[-1 - len(told) : -1] == [f"{label:8}  {text}" for label, text in told]
    assert re.fullmatch(rf"next, \d+ (s|min)  {re.escape(verdict['next'])}", out[-1])
    subject = "vggf, 0.250M weights, digits; batch 64, lr 0.001; 2 workers"
    assert any(line.startswith(f"NOT YET KNOWN  {subject}") for line in out[-6:])
    invoke(written, "--json", tmp_path / "v.json", "--margin", 0.5)
    assert json.loads((tmp_path / "v.json").read_text())["margin"] == 0.5
    with pytest.raises(UsageError, match="there is no folder .*no to write v.json in"):
        invoke(written, "--json", tmp_path / "no" / "v.json")


def test_report_refuses_a_folder_that_holds_something_else(tmp_path, undrawn):
    root = write_comparison(tmp_path / "a", repeats=[1])
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "report.html").write_text("<p>my own</p>")
    with pytest.raises(UsageError, match="holds no earlier report"):
        invoke(root, "--out", mine)
    assert [p.name for p in mine.iterdir()] == ["report.html"]
    with pytest.raises(UsageError, match="is not a folder"):
        check_out(mine / "report.html")
    with pytest.raises(UsageError, match="cannot write the report"):
        write_report([root], mine / "report.html" / "below")
    (tmp_path / "theirs" / "plots").mkdir(parents=True)
    (mine / "plots").symlink_to(tmp_path / "theirs" / "plots")
    with pytest.raises(UsageError, match="plots is a symbolic link"):
        check_out(mine)


def test_the_table_needs_neither_torch_nor_matplotlib(tmp_path):
    root = write_comparison(tmp_path, repeats=[1])
    code = (
        f"{FORETELLS_LITTLE}"
        "import sys; from hvdtrain.comparing.report_command import report\n"
        f"report.main([{str(root)!r}], standalone_mode=False)\n"
        "print({'torch', 'matplotlib', 'scipy.stats'} & set(sys.modules))\n"
        "import hvdtrain.reporting.explaining.pictures  # for pages: scipy.stats would be a tenth of their time\n"
        "print({'torch', 'scipy.stats'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.splitlines()[-2:]) == (0, ["set()", "set()"]), done.stderr


def test_a_resumed_run_is_told_and_one_that_changed_on_the_way_is_left_out(tmp_path):
    part = {"after_step": 0, "mode": "single", "workers": 1, "servers": 0}
    write(tmp_path, change={"parts": [part, part | {"after_step": 10}]})
    write(
        tmp_path,
        "allreduce",
        2,
        change={"parts": [part, part | {"mode": "allreduce", "workers": 2}]},
    )
    runs = find_runs([tmp_path])
    assert [run.problem for run in runs if not run.is_finished] == [
        "it was resumed in another way: mode single, then allreduce; workers 1, then 2"
    ]
    assert any(
        "stopped and resumed" in line
        for line in reach_answer([run for run in runs if run.is_finished]).but
    )


@pytest.mark.parametrize(
    ("ended", "lost", "problem"),
    [
        ({1: "left"}, [], "ranks [1], which left on the way"),
        ({1: "left"}, [1], "ranks [1], which left on the way"),  # it was lost before, and came back
        (
            {0: "left", 1: "its connection ended"},
            [1],
            "ranks [1], which died on the way, and ranks [0], which left",
        ),
        ({}, [1], ""),
    ],
)
def test_a_run_that_ended_without_a_worker_says_what_became_of_it(tmp_path, ended, lost, problem):
    lives = [
        {"rank": rank, "incarnation": 2, "joined": 1.0, "why": ended.get(rank, "")}
        for rank in range(2)
    ]
    lives.insert(
        0, {"rank": 1, "incarnation": 1, "joined": 0.0, "left": 1.0, "why": "its connection ended"}
    )
    found = load_run(write(tmp_path, "ps-async", 2, 0, membership=lives, lost_workers=lost)).problem
    assert found.startswith(f"it finished without {problem}") if problem else found == ""


@pytest.mark.parametrize("width", [10, 30, 40, 200])
def test_on_a_narrow_terminal_no_figure_is_broken(width):
    rows = [["allreduce ×2", "969 (820–1,163)", "1.00"], ["one process, 2 cores", "1,394", "1.44"]]
    shown = io.StringIO()
    print_table(
        Console(file=shown, width=width), words_table("", ["", "samples/s", "× ring"], rows)
    )
    for label, *figures in rows:
        assert label in shown.getvalue()
        assert set(" ".join(figures).split()) <= set(shown.getvalue().split())
