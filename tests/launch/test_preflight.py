"""What is found wrong with hosts before anything starts. Here the host is this machine; see
test_testbed for others.
"""

import dataclasses
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import hvdtrain
from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import UsageError
from hvdtrain.base.system.cgroups import usable_cores
from hvdtrain.launch import preflight, probe
from hvdtrain.launch.hosts import Host
from hvdtrain.launch.memory import BASE_MB, PARAMETERS, rank_mb
from hvdtrain.launch.preflight import Requirements, check_hosts, describe_hosts
from hvdtrain.models import make, vgg

pytestmark = pytest.mark.timeout(60)
HERE = [Host("localhost", 2)]


@pytest.fixture
def needs(tmp_path):
    return Requirements(str(tmp_path), tmp_path / "runs" / "new", [], 1.0)


def problems(needs, hosts=HERE):
    with pytest.raises(UsageError) as refused:
        check_hosts(hosts, needs)
    return list(refused.value.args)


def test_a_host_that_can_is_let_pass_and_nothing_is_left(needs, tmp_path):
    assert check_hosts(HERE, needs, measure=True) == ("", ())
    assert list(tmp_path.iterdir()) == []


def test_what_hosts_have_is_asked_of_each():
    found = describe_hosts(HERE)["localhost"]
    assert found["cores_usable"] == usable_cores() and found["memory_gb"] > 0
    with pytest.raises(UsageError, match=r"^nosuch.invalid: "):
        describe_hosts([*HERE, Host("nosuch.invalid", 1)])


def test_all_that_is_wrong_is_one_line_a_host(needs):
    needs = dataclasses.replace(needs, rank_mb=1e9, files=["/no/such/data"])
    lines = problems(needs, [*HERE, Host("nosuch.invalid", 1)])
    assert len(lines) == 2
    assert "MB of memory are free, and 2 rank(s) need 2,000,000,000 MB at least" in lines[0]
    assert (
        lines[0].startswith("localhost: ")
        and "; there is no /no/such/data, which its ranks would read" in lines[0]
    )
    assert lines[1].startswith("nosuch.invalid: ") and "\n" not in lines[1]


def test_ranks_cannot_start_in_a_folder_that_is_not_there(needs):
    [line] = problems(dataclasses.replace(needs, working_folder="/no/such/folder"))
    assert line.startswith("localhost: ") and "/no/such/folder" in line


def test_other_code_of_the_same_version_is_told_from_ours(needs, tmp_path):
    shutil.copytree(
        Path(hvdtrain.__file__).parent,
        tmp_path / "hvdtrain",
        ignore=shutil.ignore_patterns("*.pyc"),
    )
    assert check_hosts(HERE, needs, measure=True) == ("", ())
    (tmp_path / "hvdtrain" / "train.py").write_text("# changed\n")
    [line] = problems(needs)
    assert "hvdtrain 0." in line and f"in {tmp_path}/hvdtrain, here 0." in line


def test_names_that_several_hosts_share_are_told(needs):
    for line in problems(needs, [Host("localhost", 1), Host("127.0.0.1", 1)]):
        assert f"it calls itself {socket.gethostname()}, as" in line


def test_a_host_that_nobody_answers_on_is_named():
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        socket.create_server(("127.0.0.1", 0)) as listening,
    ):
        port = taken.getsockname()[1]
        taken.close()
        hosts = {"gone": ["127.0.0.1", port], "there": list(listening.getsockname())}
        assert probe.unreachable({"hosts": hosts, "launcher": 0}) == {
            "gone": "127.0.0.1: Connection refused"
        }


@pytest.mark.parametrize(
    ("known", "address"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("127.0.1.1", "10.0.0.9"),
        ("192.0.2.1", "10.0.0.9"),
        ("", "10.0.0.9"),
    ],
)
def test_others_reach_a_host_by_an_address_that_is_not_loopback(known, address, monkeypatch):
    interfaces = {"127.0.0.1": "lo", "10.0.0.9": "eth0", "10.0.0.7": "ib0"}
    monkeypatch.setattr(socket, "gethostname", lambda: "nosuch.invalid")
    assert probe.choose_interface(known, interfaces) == (interfaces[address], address)


def test_an_interface_that_is_named_must_be_there(needs):
    here, there, other = problems(
        dataclasses.replace(needs, interface="nosuch0"), [*HERE, Host("127.0.0.1", 1)]
    )
    assert here == "this machine has no network interface nosuch0"
    assert there.startswith("localhost: it has no network interface nosuch0 with an address")
    assert "cannot connect" not in there + other  # which follows, and means no firewall
    assert probe.choose_interface("10.0.0.9", {"10.0.0.9": "eth0", "10.0.0.7": "ib0"}, "ib0") == (
        "ib0",
        "10.0.0.7",
    )


def test_the_probe_ends_with_the_connection(tmp_path):
    words = [sys.executable, "-Pm", "hvdtrain.launch.probe"]
    done = subprocess.run(words, input="", text=True, capture_output=True, timeout=30)
    assert done.returncode != 0 and probe.REPLY_PREFIX not in done.stdout


@pytest.mark.parametrize("count", range(2, 12))
def test_in_a_round_every_host_sends_to_one_and_receives_from_one(count):
    hosts = [f"h{n}" for n in range(count)]
    made = preflight.rounds(hosts)
    for pairs in made:
        assert (
            sorted(one for one, _ in pairs) == sorted(other for _, other in pairs) == sorted(hosts)
        )
        assert all(one != other for one, other in pairs)
    asked = [pair for pairs in made for pair in pairs]
    assert len(set(asked)) == len(asked) == count * min(count - 1, preflight.ROUNDS)


def test_bandwidth_is_measured_and_who_does_not_answer_has_none():
    # memory is faster than that, though others compute meanwhile
    assert 0.01 < probe.gbit_s(("127.0.0.1", probe.serve("127.0.0.1"))) < 1e4
    assert probe.gbit_s(("127.0.0.1", 1)) is None


# Memory


@pytest.mark.parametrize("width", [0.125, 0.5, 1.0])
@pytest.mark.parametrize("model", vgg.NAMES)
def test_parameters_are_estimated_from_below(model, width):
    import torch

    with torch.device("meta"):
        exact = sum(p.numel() for p in make(model, 10, width).parameters())
    assert 0.85 * exact < PARAMETERS * width**2 < 1.01 * exact


@pytest.mark.parametrize(
    ("options", "workers", "copies"),
    [
        ({"optimizer": "adam"}, 3, 4),
        ({"optimizer": "sgd", "momentum": 0.0}, 3, 2),
        ({"mode": "ps-sync", "servers": 1, "optimizer": "adam"}, 3, (3 * 2 + 4) / 4),
        ({"mode": "ps-sync", "servers": 3, "optimizer": "sgd"}, 1, (2 + 3) / 4),
        ({"device": "cuda"}, 1, 0),
    ],
)
def test_memory_counts_weights_gradients_and_the_optimizers_states(options, workers, copies):
    config = RunConfig(**{"mode": "allreduce", "width": 1.0} | options)
    assert rank_mb(config, workers) == pytest.approx(BASE_MB + copies * PARAMETERS * 4 / 2**20)
