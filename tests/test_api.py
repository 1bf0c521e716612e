"""hvdtrain from Python: the page's example, in a thread as in a notebook, and what is wrong as an
exception.
"""

import json
import math
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.foretold import BESIDE_TESTS, OF_SMALL_MODELS, foretell_little
from helpers.forked_jobs import forks_first

import hvdtrain as hv

PAGE = Path(__file__).parent.parent / "hvdtrain/comparing/README.md"
IN_A_THREAD = """
import sys, threading
before = {*sys.modules}
import hvdtrain
heavy = [name for name in sys.modules if name.split(".")[0] in ("torch", "numpy", "click", "rich")]
exec(sys.argv[2])
found = {}
thread = threading.Thread(target=exec, args=(sys.argv[1], found))
thread.start()
thread.join()
import json
result, table = found["result"], found["table"]
print(json.dumps({
    "heavy": heavy, "answer": result.answer, "verdict": result.verdict, "modes": [run.kind.mode for run in result.runs],
    "columns": list(table.columns), "rows": len(table), "html": result._repr_html_(),
    "plotted": result.plot().has_data(), "parts": found["parts"], "hv": callable(found["hv"].compare),
    "repr": repr(result),
}))
"""


def test_completion_and_help_show_what_one_calls():
    shown = [name for name in dir(hv) if not name.startswith("_")]
    assert sorted(hv.__all__) == shown and {"compare", "read", "explain", "plan"} <= {*shown}
    text = pydoc.plain(pydoc.render_doc(hv))
    assert 0 < text.index("compare(modes=") < text.index("PACKAGE CONTENTS")
    for name in hv.__all__:
        assert getattr(hv, name).__doc__ and f"{name}" in text


@pytest.mark.timeout(200)
def test_the_pages_example_runs_in_a_thread(tmp_path, monkeypatch):
    foretell_little(monkeypatch)
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            IN_A_THREAD,
            example,
            forks_first() + BESIDE_TESTS + OF_SMALL_MODELS,
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["heavy"] == []
    assert said["modes"] == ["allreduce", "ps-sync"] and said["rows"] == 2
    assert {"mode", "run", "samples_per_s"} <= set(said["columns"])
    assert said["answer"] == said["verdict"]["answer"] == "NOT YET KNOWN"
    assert said["verdict"] == json.loads((tmp_path / "runs/python/verdict.json").read_text())
    assert said["verdict"]["flips"] == hv.read(tmp_path / "runs/python").verdict["flips"]
    assert "<h1>NOT YET KNOWN</h1>" in said["html"] and "<table>" in said["html"]
    assert said["repr"].startswith("<NOT YET KNOWN: ") and len(said["repr"]) < 1000
    assert said["plotted"]
    assert said["parts"]["computing"] > 0
    assert said["hv"], "a room hides the function of its name"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: hv.compare(mods=["allreduce"]), "unknown option 'mods'.*did you mean modes"),
        (lambda: hv.compare(workers="many"), "'many' is not a valid integer"),
        (
            lambda: hv.compare(model=lambda classes: None),
            "model is a function: name what makes it, as model=",
        ),
        (lambda: hv.compare(modes=["ring"], dry_run=True), "unknown mode 'ring'"),
        (lambda: hv.read("nowhere"), "there is no folder nowhere"),
        (lambda: hv.explain("nowhere"), "there is no folder nowhere"),
        (lambda: hv.plan("cal.json"), "there is no calibration cal.json"),
        (
            lambda: hv.plan("cal.json", modes=["allreduce"], bandwidth="fast"),
            "'fast' is not a bandwidth",
        ),
        (lambda: hv.plan("cal.json", price_host=math.nan), "'nan' is not a number"),
    ],
)
def test_what_is_wrong_is_an_exception_with_the_commands_sentence(
    call, says, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(hv.UsageError, match=says):
        call()
