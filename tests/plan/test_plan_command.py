"""`hvdtrain plan` from a measurement to answers, as a person runs it."""

import json
import subprocess
import sys

import pytest

from hvdtrain.explain.step_picture import read_slices


def hvdtrain(*words, folder, code=0):
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain", *words], cwd=folder, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == code, done.stderr
    return done


@pytest.mark.timeout(240)
def test_from_a_calibration_to_answers(tmp_path):
    """Real ranks exchange gradients, a real model is timed; then who wins, the best use of hosts, and a trace."""
    hvdtrain("plan", "calibrate", "--width", "0.0625", "--batch-size", "4", "--out", "cal.json", folder=tmp_path)
    found = json.loads((tmp_path / "cal.json").read_text())
    assert sum(layer["forward_ms"]["value"] for layer in found["layers"]) > 0
    assert found["codecs"]["int8"]["wire_share"]["value"] == pytest.approx(0.25, abs=0.01)
    for kind in {"ps", "allreduce", "ddp"} - set(found["made"]["guessed"]):
        assert 0.01 < found["transports"][kind]["send_s_per_gb"]["value"] < 50
    assert "ps" not in found["made"]["guessed"]  # the first that is measured

    done = hvdtrain(
        "plan", "predict", "cal.json", "--workers", "2,16", "--servers", "1", "--bandwidth", "10mbit,10gbit",
        "--modes", "allreduce,ps-sync", "--json", "rows.json", "--plot", "plan.svg", folder=tmp_path,
    )  # fmt: skip
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert len(rows) == 2 * 2 * 2
    assert "either" in done.stdout or "×" in done.stdout
    assert "intervals beyond are wider" in done.stdout
    assert (tmp_path / "plan.svg").read_text().startswith("<?xml")

    one = ["--workers", "2", "--servers", "1", "--modes", "ps-sync", "--bandwidth", "1gbit"]
    hvdtrain("plan", "predict", "cal.json", *one, "--trace", "t.pftrace", folder=tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "t.pftrace").rename(tmp_path / "run" / "trace.pftrace")
    assert len(read_slices(tmp_path / "run")) > 20
    done = hvdtrain("plan", "predict", "cal.json", "--trace", "t.pftrace", folder=tmp_path, code=2)
    assert done.stderr.startswith("hvdtrain: --trace is of one prediction") and done.stderr.count("\n") == 1
