"""`hvdtrain plan` from a measurement to answers, as a person runs it."""

import json

import pytest
from helpers.forked_jobs import forks_first
from helpers.jobs import hvdtrain

# Measured often enough for a test.
BRIEFLY = (
    "from hvdtrain.planning import calibrate, probe; calibrate.PROFILE_S, probe.SAMPLES = 0.5, 2; "
    "calibrate.LINKS_S = 0.0"
)


def plan(*words, code=0):
    done = hvdtrain("plan", *words, first=forks_first() + BRIEFLY)
    assert done.returncode == code, done.stdout
    return done.stdout


@pytest.mark.timeout(240)
def test_from_a_calibration_to_answers(tmp_path, monkeypatch):
    """Real ranks exchange gradients, a real model is timed; then who wins."""
    monkeypatch.chdir(tmp_path)
    plan("calibrate", "--width", "0.0625", "--batch-size", "4", "--out", "cal.json")
    found = json.loads((tmp_path / "cal.json").read_text())
    assert sum(layer["forward_ms"]["value"] for layer in found["layers"]) > 0
    assert found["codecs"]["int8"]["wire_share"]["value"] == pytest.approx(0.25, abs=0.01)
    assert {"allreduce", "ddp"}.issuperset(found["made"]["guessed"])  # the last that are measured
    for kind in {"ps", "ps-zmq", "allreduce", "ddp"} - set(found["made"]["guessed"]):
        assert 0.01 < found["transports"][kind]["send_s_per_gb"]["value"] < 50

    printed = plan(
        "predict",
        "cal.json",
        "--workers",
        "2,4",
        "--servers",
        "1",
        "--bandwidth",
        "10mbit,10gbit",
        "--modes",
        "allreduce,ps-sync",
        "--json",
        "rows.json",
        "--plot",
        "plan.svg",
    )
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert len(rows) == 2 * 2 * 2 + 2  # and one machine, with the batch of either
    assert "The fastest, and how probably" in printed
    assert "intervals beyond are wider" in printed
    assert (tmp_path / "plan.svg").read_text().startswith("<?xml")
