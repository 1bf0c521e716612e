"""Where the answer of a comparison flips, and what bandwidth a job needs: arithmetic on run
folders.
"""

import json
import re

import pytest
from click.testing import CliRunner
from helpers import report_runs
from helpers.foretold import foretell_little
from planning.test_calibration import ANY, make

from hvdtrain.comparing.report_command import report
from hvdtrain.planning import predict
from hvdtrain.planning.flips import flips
from hvdtrain.planning.predict import MOST_GBIT, needs
from hvdtrain.reporting.comparisons import split_into_comparisons
from hvdtrain.runs.read import find_runs

CHANCES = ("p_ring", "p_servers", "p_one_machine")


MODES = (("single", 0, 60.0), ("allreduce", 0, 100.0), ("ps-sync", 1, 70.0))


def comparison(root, hosts=2, repeats=(1, 2), modes=MODES, cores=2, **changed):
    """Two workers on as many hosts at 1 Gbit/s, as the first run of the ring measured, which is the
    fastest; 10 MB.
    """
    names = [f"host{n}" for n in range(hosts)]
    pairs = [{"from": a, "to": b, "gbit_s": 1.0} for a in names for b in names if a != b]
    for mode, servers, speed in modes:
        workers = 1 if mode == "single" else 2
        ranks = [
            [n for n in range(servers + workers) if max(0, n - servers) % hosts == at]
            for at in range(hosts)
        ]
        each = {"cores": cores, "cores_usable": cores}
        of = {name: {"ranks": on} | each for name, on in zip(names, ranks, strict=True) if on}
        hardware = {"cpu": "A CPU", "cores": cores, "hosts": list(of)}
        change = {"parameters": 2_500_000, "hosts": of, "hardware": hardware}
        change |= changed if workers > 1 else {"threads_per_worker": cores}
        for repeat in repeats:
            is_measured = hosts > 1 and (mode, repeat) == ("allreduce", repeats[0])
            change |= {"network": {"pairs": pairs if is_measured else []}}
            summarised = {} if hosts > 1 else {"processes": processes(ranks[0], servers, speed)}
            report_runs.write(
                root / "runs",
                mode,
                workers,
                servers,
                repeat,
                speed=speed + repeat,
                change=change,
                **summarised,
            )
    return root


def processes(ranks, servers, speed):
    """The processes of one host. Two workers and a server keep nine tenths of two cores busy."""
    wall_s = report_runs.EPOCHS * report_runs.PER_EPOCH * report_runs.BATCH / speed
    shares = [0.2 if rank < servers else 0.8 for rank in ranks]
    return [{"rank": rank, "cpu_s": shares[rank] * wall_s} for rank in ranks]


@pytest.fixture
def little(monkeypatch):
    foretell_little(monkeypatch)


one_report = pytest.mark.xdist_group("flips")  # which one process makes


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """The folder of a report, and what it says on the screen."""
    folder = tmp_path_factory.mktemp("reported")
    root, out = comparison(folder / "compared"), folder / "out"
    done = CliRunner().invoke(report, [str(root), "--out", str(out)])
    assert done.exit_code == 0, done.output
    return out, done.output


def foretold(out):
    return json.loads((out / "verdict.json").read_text())["flips"]


@one_report
def test_a_report_ends_with_where_the_answer_flips(reported):
    """On a screen, in verdict.json, and as a map with what was measured in the pages."""
    out, printed = reported
    [said] = [line for line in printed.splitlines() if line.startswith("forecast ")]
    assert "on 2 machines at 1 Gbit/s" in said
    found = foretold(out)
    assert found["says"].split()[0] in said and found["measured"] == {
        "workers": 2,
        "answer": "NOT YET KNOWN",
    }
    assert {(place["workers"], place["bandwidth_gbit"]) for place in found["map"]} >= {
        (2, 1.0),
        (2, 0.1),
        (16, 10.0),
    }
    assert all(sum(place[name] for name in CHANCES) == pytest.approx(1) for place in found["map"])
    for name in ("report.md", "report.html"):
        assert (
            "The answer elsewhere, predicted; measured with 2 workers" in (out / name).read_text()
        )


@one_report
def test_slower_networks_turn_an_answer_to_one_machine(reported):
    places = foretold(reported[0])["map"]
    alone = {
        (place["workers"], place["bandwidth_gbit"]): place["p_one_machine"] for place in places
    }
    assert (
        alone[2, 0.1] > alone[16, 0.1] > alone[16, 1.0]
        and alone[2, 0.1] > alone[2, 1.0] >= alone[16, 10.0]
    )


def test_a_probability_says_that_other_work_disturbed_a_run(little, tmp_path):
    """From 5 % of the cores on, as a comparison has it."""
    shares = []
    for others in (0.05, 1.0):
        root = comparison(tmp_path / str(others))
        for summary in root.glob("runs/*/summary.json"):
            content = json.loads(summary.read_text())
            load = {"cores": 2, "others_cores": others, "stolen_share": 0.0}
            summary.write_text(json.dumps(content | {"load": {"host0": load}}))
        found = flips(find_runs([root]), "NOT YET KNOWN")
        shares.append(found["here"]["others_share"])
        assert all(place["others_share"] == shares[-1] for place in found["map"])
    assert shares == [0.0, 0.5]


def test_a_host_has_its_cores_where_no_run_was_of_one_process(little, tmp_path):
    """One machine of sixteen cores is faster than one of one core."""
    found = []
    for cores in (1e-300, 1, 16):  # the first as a damaged manifest has it
        hardware = {"cores": 16, "cores_usable": cores, "hosts": ["host0"]}
        runs = find_runs(
            [comparison(tmp_path / str(cores), hosts=1, modes=MODES[1:], hardware=hardware)]
        )
        found.append(flips(runs, "RING")["here"]["one_machine_samples_per_s"])
    assert found[2] > 4 * found[1] and found[0] > 0


def over_one_machine(root, threads=1, cores=2):
    """What is foretold of two workers that shared a host with so many cores, each on a machine of
    its own: samples/s over those of one machine.
    """
    modes = (("single", 0, 100.0), ("allreduce", 0, 75.0))
    changed = {"threads_per_worker": threads, "parameters": 100_000}
    runs = find_runs([comparison(root, hosts=1, modes=modes, cores=cores, **changed)])
    here = flips(runs, "RING")["here"]
    assert (here["hosts"], here["workers"]) == (2, 2)
    return here["ring_samples_per_s"] / here["one_machine_samples_per_s"]


def test_workers_that_shared_a_host_have_all_cores_on_hosts_of_their_own(little, tmp_path):
    """As contenders over two hosts have: where messages cost next to nothing, two machines do
    nearly twice as much.
    """
    assert 1.6 < over_one_machine(tmp_path / "shared") < 2.1


def test_workers_that_were_given_fewer_threads_than_their_share_keep_them(little, tmp_path):
    assert over_one_machine(tmp_path / "few", threads=1, cores=16) < 1.5


def test_one_machine_is_as_fast_as_the_fastest_that_ran_on_one(little, tmp_path):
    two = comparison(tmp_path / "two")
    ring = tmp_path / "ring"
    comparison(ring, hosts=1, modes=(("allreduce", 0, 90.0),))
    found = []
    for paths in ([two], [two, ring]):
        [of] = split_into_comparisons(find_runs(paths))
        found.append(flips(of.runs, "RING")["here"])
    faster = found[1]["one_machine_samples_per_s"] / found[0]["one_machine_samples_per_s"]
    assert faster == pytest.approx(91 / 61, rel=0.02)
    assert found[1]["ring_samples_per_s"] == found[0]["ring_samples_per_s"]


def test_runs_that_the_model_misses_leave_less_sure_and_are_told(little, tmp_path):
    """Messages are taken to cost at least a fifth of a guess, and at most five times as much. A
    thousand times the weights cannot be sent in the same time. A few weights are sent in no time,
    while workers waited in a quarter of the step.
    """
    missed = {}
    for parameters in (
        2_500_000_000,
        100_000,
    ):
        found = flips(
            find_runs([comparison(tmp_path / str(parameters), hosts=1, parameters=parameters)]),
            "RING",
        )
        assert found["says"].startswith("on 2 machines at 1 Gbit/s: perhaps ")
        told = r"without a probability, because the model takes .* to be ([\d.]+) times (longer|shorter) than they are$"
        [(factor, direction)] = re.findall(told, found["says"])
        missed[direction] = float(factor)
        assert (
            "(probability " not in found["says"]
            and found["map"] == []
            and not set(CHANCES) & found["here"].keys()
        )
    assert missed["longer"] > 3 and 1.3 <= missed["shorter"] < 2


def test_runs_that_share_the_cores_of_one_host_lead_to_a_probability(little, tmp_path):
    """Their steps are simulated with the processor time that computing took, and not with its wall
    time, which has the time in it in which others had the cores.
    """
    found = flips(find_runs([comparison(tmp_path, hosts=1)]), "RING")
    assert found["says"].startswith("on 2 machines at 1 Gbit/s: ")
    assert "because the model" not in found["says"]
    assert set(CHANCES) <= found["here"].keys()


def test_what_was_measured_with_local_steps_is_foretold_with_them(little, tmp_path):
    """The line names them. Without local steps it names none."""
    runs = find_runs([comparison(tmp_path / "with", options={"local_steps": 5})])
    found = flips(runs, "RING")
    assert found["here"]["local_steps"] == 5
    assert found["says"].startswith("on 2 machines at 1 Gbit/s with 5 local steps: ")
    without = flips(find_runs([comparison(tmp_path / "without")]), "RING")
    assert without["says"].startswith("on 2 machines at 1 Gbit/s: ")


def test_what_cannot_be_foretold_says_why(tmp_path):
    slow = comparison(tmp_path / "slow", repeats=(1,), slow={"asked": "1:4x", "achieved": {}})
    found = flips(find_runs([slow]), "RING")
    assert found == {"says": "no forecast: allreduce-w2-s0-r1 was run with --slow 1:4x", "map": []}
    report_runs.write(tmp_path / "alone", "single")
    assert (
        flips(find_runs([tmp_path / "alone"]), "UNKNOWN")["says"]
        == "no forecast: nothing here is distributed"
    )


def needed(made, **options):
    jobs = predict.scenarios(ANY, ["allreduce", "ps-sync"], [4], ["equal"], [1.0], [1, 16])
    return {(row["mode"], row["local_steps"]): row for row in needs(made, jobs, **options)}


def test_with_the_bandwidth_it_needs_a_job_is_as_efficient_as_asked():
    found = needed(make(), efficiency=0.6)
    for (mode, steps), row in found.items():
        asked = predict.scenarios(ANY, [mode], [4], ["equal"], [row["bandwidth_gbit"]], [steps])
        step_s = predict.simulate(make().with_costs(asked[0])).step_s
        alone_s = predict.simulate(make().with_costs(ANY)).step_s
        assert alone_s / step_s == pytest.approx(0.6, rel=0.05)
        assert row["bandwidth_gbit"] < row["sure_gbit"]
    assert found["allreduce", 16]["bandwidth_gbit"] < found["allreduce", 1]["bandwidth_gbit"] / 6


def test_where_messages_cost_too_much_no_bandwidth_is_enough():
    found = needed(make(cores_per_host=0.2), efficiency=0.99)
    assert found["allreduce", 1]["bandwidth_gbit"] == MOST_GBIT
    assert found["allreduce", 1]["most"] < 0.99
