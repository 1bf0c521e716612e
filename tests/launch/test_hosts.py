"""Host lists and files, and which rank goes where."""

import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.base.config.recipes import launcher
from hvdtrain.base.errors import UsageError
from hvdtrain.launch.hosts import (
    Host,
    allocate,
    given_hosts,
    hosts_of_ranks,
    parse_hostfile,
    parse_hosts,
)
from hvdtrain.launch.recipe import JobSpec, expand


def test_hosts_on_the_command_line():
    assert parse_hosts("a:1, b.example.org:2,10.0.0.3") == [
        Host("a", 1),
        Host("b.example.org", 2),
        Host("10.0.0.3", 1),
    ]


def test_a_file_is_read_whichever_option_names_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("a slots=2\nb\n")
    assert (
        given_hosts("hosts", None)
        == given_hosts(None, Path("hosts"))
        == [Host("a", 2), Host("b", 1)]
    )
    assert given_hosts("other", None) == [Host("other", 1)]
    assert len(given_hosts(",".join(f"node{number}" for number in range(99)), None)) == 99
    with pytest.raises(UsageError, match="exclude each other"):
        given_hosts("hosts", Path("hosts"))


@pytest.mark.parametrize("hosts", ["", " "])
def test_an_empty_list_is_not_taken_for_this_machine(hosts):
    """As of a shell's variable that is not set."""
    with pytest.raises(UsageError, match="^-H names no host: give hosts, or leave -H out$"):
        given_hosts(hosts, None)
    assert given_hosts(None, None) == []


def test_a_file_may_have_any_of_the_usual_forms(tmp_path):
    file = tmp_path / "hosts"
    file.write_text(
        "# nodes\n\nnode1 slots=2\nnode2:3   # MPICH's way\n  node3\nnode4 slots=1 max_slots=4\n"
    )
    assert parse_hostfile(file) == [
        Host("node1", 2),
        Host("node2", 3),
        Host("node3", 1),
        Host("node4", 1),
    ]
    # a line for each slot, as PBS has its $PBS_NODEFILE
    file.write_text("node2\nnode1\nnode2\nnode1 slots=2\n")
    assert parse_hostfile(file) == [Host("node2", 2), Host("node1", 3)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("node1 slots=x", "line 1: 'x' is not a number of slots"),
        ("a\nnode1 cpus=2", "line 2: 'node1 cpus=2' is not understood"),
        ("a;rm", "line 1: 'a;rm' is not the name of a host"),
        ("-oProxyCommand=x", "is not the name of a host"),
        ("a:0", "'0' is not a number of slots"),
        ("# nothing\n", "names no host"),
    ],
)
def test_a_file_that_says_something_else_is_refused_with_its_line(text, words, tmp_path):
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(UsageError) as refused:
        parse_hostfile(tmp_path / "hosts")
    assert words in str(refused.value)
    with pytest.raises(UsageError, match="it is no regular file"):
        parse_hostfile(Path("/dev/zero"))


@pytest.mark.parametrize(
    "text", ["", "a:b", "a:-1", "a,,b", "a b:1", "a\n:1", "a:99999", "a:1,a:2"]
)
def test_a_list_that_is_none_is_refused(text):
    with pytest.raises(UsageError):
        parse_hosts(text)


@pytest.mark.parametrize(
    ("word", "words"),
    [
        (
            "10.0.0.1:6006:1",
            "'6006:1' is not a number of slots: .*`Port 6006` under `Host 10.0.0.1`",
        ),
        ("me@node1:2222:2", "`Port 2222` under `Host me@node1`"),
        ("node1:22022", "'22022' is not a number of slots: a host is name:slots"),
        ("[fe80::1]:2", r"\[fe80::1\]:2 is an IPv6 address"),
        ("::1", "::1 is an IPv6 address"),
        ("2001:db8::7:1", "is an IPv6 address, .* give the host a name"),
    ],
)
def test_forms_of_other_tools_are_refused_with_where_it_goes(word, words, tmp_path):
    (tmp_path / "hosts").write_text(f"node9\n{word}\n")
    for read, given_as in ((parse_hosts, f"a:1,{word}"), (parse_hostfile, tmp_path / "hosts")):
        with pytest.raises(UsageError, match=words):
            read(given_as)


@given(st.text(max_size=40))
def test_no_name_that_a_shell_could_misread_passes(text):
    try:
        hosts = parse_hosts(text)
    except UsageError:
        return
    for host in hosts:
        assert not set(host.name) & set(" \t\n;&|<>$`\"'\\(){}[]*?!#~=%^")
        assert not host.name.startswith("-")


SLOTS = st.lists(st.integers(1, 6), min_size=1, max_size=6)


@given(SLOTS, st.data())
def test_ranks_fill_hosts_evenly(slots, data):
    ranks = data.draw(st.integers(1, sum(slots)))
    hosts = [Host(f"h{i}", n) for i, n in enumerate(slots)]
    used = allocate(hosts, ranks)
    assert sum(host.slots for host in used) == ranks
    room = {host.name: host.slots for host in hosts}
    most = max(host.slots for host in used)
    for host in hosts:
        taken = next((u.slots for u in used if u.name == host.name), 0)
        assert taken <= room[host.name]
        assert taken >= min(most - 1, room[host.name]), (
            "a host is left aside while another is crowded"
        )
    with pytest.raises(UsageError, match="slots, and there are"):
        allocate(hosts, sum(slots) + 1)


@given(SLOTS, st.integers(0, 6))
def test_a_ring_crosses_the_network_once_a_host_and_servers_are_spread(slots, servers):
    hosts = [Host(f"h{i}", n) for i, n in enumerate(slots)]
    servers = min(servers, sum(slots) - 1)
    order = hosts_of_ranks(hosts, servers)
    assert sorted(order) == sorted(host.name for host in hosts for _ in range(host.slots))
    if servers:
        assert len(set(order[:servers])) == min(servers, len(hosts))
        return
    crossings = [
        first for first, second in zip(order, order[1:] + order[:1], strict=True) if first != second
    ]
    assert len(crossings) == (len(hosts) if len(hosts) > 1 else 0)


@pytest.mark.parametrize(("servers", "order"), [(0, ["a", "a", "b"]), (1, ["a", "b", "a"])])
def test_every_starter_puts_ranks_where_the_list_of_hosts_says(servers, order, tmp_path):
    assert hosts_of_ranks([Host("a", 2), Host("b", 1)], servers) == order
    slot, block = ("node", "cyclic") if servers else ("slot", "block")
    spec = JobSpec(3, ["true"], servers, [Host("a", 2), Host("b", 1)], tmp_path / "run")
    written = "\n".join(expand(launcher("srun"), spec).files.values())
    assert written.split() == order
    assert f"--map-by {slot} " in expand(launcher("mpi"), spec).dry_run_text()
    for name in ("sge", "pbs", "slurm", "kubernetes"):
        text = expand(launcher(name), dataclasses.replace(spec, hosts=[])).dry_run_text()
        assert re.search(rf'--map-by[\s",]+{slot}\b|--distribution={block}\b', text), name


def test_servers_without_a_slot_go_beside_the_workers():
    a_and_b = [Host("a", 1), Host("b", 1)]
    assert allocate(a_and_b, 2, 1) == [Host("a", 2), Host("b", 1)]
    assert allocate(a_and_b, 2, 2) == [Host("a", 2), Host("b", 2)]
    assert allocate(a_and_b, 2, 3) == [Host("a", 3), Host("b", 2)]
    assert allocate([Host("a", 2), Host("b", 2)], 3, 1) == [Host("a", 2), Host("b", 2)]
    assert allocate([Host("a", 3), Host("b", 1)], 2, 1) == [Host("a", 2), Host("b", 1)]
    with pytest.raises(UsageError, match="3 workers need 3 slots, and there are 1 on a"):
        allocate(a_and_b, 3, 1)
