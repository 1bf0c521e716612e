"""One network interface for all that carries bytes between hosts."""

import os
import socket

import pytest

from hvdtrain.base.errors import UsageError
from hvdtrain.base.world import network
from hvdtrain.base.world.network import READ_BY, VARIABLE, own_address, use_one_interface
from hvdtrain.base.world.place import World

ON_SEVERAL_HOSTS = World("srun", 1, 4, 0, 2)
ADDRESSES = {"127.0.0.1": "lo", "10.0.0.9": "eth0", "10.1.0.9": "ib0"}


@pytest.fixture(autouse=True)
def host(monkeypatch):
    """A host with two networks, whose name means its address in the first; no variable is set."""
    monkeypatch.setattr(network, "own_addresses", lambda: ADDRESSES)
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.0.0.9")
    chosen_before = (*READ_BY, VARIABLE, "NCCL_SOCKET_IFNAME")
    environment = {name: value for name, value in os.environ.items() if name not in chosen_before}
    monkeypatch.setattr(os, "environ", environment)
    return environment


def test_every_library_is_given_the_interface_and_ranks_meet_on_it(host):
    host[VARIABLE] = "ib0"
    host["GLOO_SOCKET_IFNAME"] = "eth0"  # of a site, before anybody thought of this job
    assert use_one_interface(ON_SEVERAL_HOSTS) == "ib0"
    assert [host[name] for name in READ_BY] == ["ib0"] * 4
    assert {
        "TP_SOCKET_IFNAME",
        "GLOO_SOCKET_IFNAME",
        "HOROVOD_GLOO_IFACE",
        "OMPI_MCA_btl_tcp_if_include",
    } == {*READ_BY}
    assert host["NCCL_SOCKET_IFNAME"] == "=ib0"
    assert own_address(ON_SEVERAL_HOSTS) == "10.1.0.9"
    assert use_one_interface(ON_SEVERAL_HOSTS) == "ib0"  # again, as for the manifest


@pytest.mark.parametrize("variable", READ_BY)
def test_the_interface_of_one_library_is_that_of_all(variable, host):
    """horovodrun sets Horovod's, mpirun MPI's: the servers' rpc must not take another."""
    host[variable] = "ib0"
    assert use_one_interface(ON_SEVERAL_HOSTS) == "ib0"
    assert [host[name] for name in READ_BY] == ["ib0"] * 4


def test_two_networks_for_one_job_are_refused(host):
    host.update(HOROVOD_GLOO_IFACE="ib0", GLOO_SOCKET_IFNAME="eth0")
    with pytest.raises(
        UsageError,
        match="^GLOO_SOCKET_IFNAME=eth0 and HOROVOD_GLOO_IFACE=ib0 name different networks.*"
        "set HVDTRAIN_INTERFACE",
    ):
        use_one_interface(ON_SEVERAL_HOSTS)


@pytest.mark.parametrize("variable", [VARIABLE, *READ_BY])
def test_an_interface_that_this_host_does_not_have_is_one_line(variable, host):
    host[variable] = "ib1"
    with pytest.raises(UsageError) as refused:
        use_one_interface(ON_SEVERAL_HOSTS)
    says = (
        f"{variable}=ib1: node7 has no network interface ib1 with an address; it has eth0, ib0, lo"
    )
    assert str(refused.value) == says


@pytest.mark.parametrize("value", ["eth0,ib0", "10.1.0.0/24", "=ib0", ""])
def test_what_names_no_single_interface_is_left_to_the_library_that_reads_it(value, host):
    host["OMPI_MCA_btl_tcp_if_include"] = value
    assert use_one_interface(ON_SEVERAL_HOSTS) == ""
    assert host["OMPI_MCA_btl_tcp_if_include"] == value and "TP_SOCKET_IFNAME" not in host
    assert own_address(ON_SEVERAL_HOSTS) == "10.0.0.9"


def test_a_job_on_one_host_stays_on_loopback_whatever_is_named(host):
    host.update({VARIABLE: "ib0", "TP_SOCKET_IFNAME": "eth0"})
    assert use_one_interface(World("mpirun", 0, 4, 0, 4)) == "lo"
    assert [host[name] for name in READ_BY[:3]] == ["lo"] * 3
    # by default another, where others of the network could reach it
    assert host["NCCL_SOCKET_IFNAME"] == "=lo"
    assert own_address(World("mpirun", 0, 4, 0, 4)) == "127.0.0.1"


LOOPBACK_NAME = [lambda name: "127.0.1.1", lambda name: (_ for _ in ()).throw(OSError("not known"))]


@pytest.mark.parametrize("resolve", LOOPBACK_NAME, ids=["Debian's hosts file", "no name"])
def test_a_host_whose_own_name_does_not_lead_to_it_takes_the_only_address_that_others_can_reach(
    resolve, host, monkeypatch
):
    """Each library would listen where the name says, and others would wait for it until the
    timeout.
    """
    monkeypatch.setattr(socket, "gethostbyname", resolve)
    monkeypatch.setattr(
        network, "own_addresses", lambda: {"127.0.0.1": "lo", "127.0.1.1": "lo", "10.0.0.9": "eth0"}
    )
    assert use_one_interface(ON_SEVERAL_HOSTS) == "eth0"
    assert [host[name] for name in READ_BY] == ["eth0"] * 4
    assert own_address(ON_SEVERAL_HOSTS) == "10.0.0.9"


@pytest.mark.parametrize("resolve", LOOPBACK_NAME, ids=["Debian's hosts file", "no name"])
def test_of_several_addresses_one_has_to_be_named(resolve, host, monkeypatch):
    monkeypatch.setattr(socket, "gethostbyname", resolve)
    says = (
        r"^this host's own name node7 does not resolve, or means loopback: "
        r".* set HVDTRAIN_INTERFACE .*\(eth0, ib0\)$"
    )
    for refuses in (use_one_interface, own_address):
        with pytest.raises(UsageError, match=says):
            refuses(ON_SEVERAL_HOSTS)
    host["OMPI_MCA_btl_tcp_if_include"] = "10.1.0.0/24"  # MPI finds its own
    assert use_one_interface(World("mpirun", 1, 4, 0, 2)) == ""
    host[VARIABLE] = "ib0"
    assert (
        use_one_interface(ON_SEVERAL_HOSTS) == "ib0" and own_address(ON_SEVERAL_HOSTS) == "10.1.0.9"
    )
