"""By which network ranks reach each other: one interface for all that carries their bytes, whichever library does."""

import os
import random
import re
import socket

from hvdtrain.errors import UsageError
from hvdtrain.world.place import World

VARIABLE = "HVDTRAIN_INTERFACE"
WIRE_KEY = "HVDTRAIN_WIRE_KEY"  # in which ranks find the key of --wire zmq: a secret key of CURVE, 40 characters
# What each library reads: TensorPipe, which carries the servers' rpc; torch's Gloo; Horovod's Gloo; OpenMPI.
READ_BY = ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE", "OMPI_MCA_btl_tcp_if_include")
LOOPBACK = "lo"
PORTS = range(20_000, 32_000)
_NAME = re.compile(r"[\w.@-]+(:\w+)?")  # not a list, and not a network such as 10.0.0.0/8


def use_one_interface(world: World) -> str:
    """Have every library use the same interface, before any of them opens a socket.

    That is loopback where all ranks are on this host; else HVDTRAIN_INTERFACE, which `hvdtrain launch` sets; else the
    one that a library's own variable names, as horovodrun and mpirun set theirs; else the only one there is, where this
    host's own name does not lead others here: each library would listen at what that means.

    Returns:
        its name; empty where none is named, and each library looks for itself.

    Raises:
        UsageError: two are named, or would do; or this host has none of that name with an address.
    """
    if world.is_local:
        os.environ.update(dict.fromkeys(READ_BY[:3], LOOPBACK))  # MPI has shared memory
        return LOOPBACK
    given = {variable: os.environ[variable] for variable in READ_BY if _NAME.fullmatch(os.environ.get(variable, ""))}
    if os.environ.get(VARIABLE):
        given = {VARIABLE: os.environ[VARIABLE]}
    if len(set(given.values())) > 1:
        named = " and ".join(f"{variable}={name}" for variable, name in given.items())
        raise UsageError(f"{named} name different networks for one job: set {VARIABLE} to the one that it is to use")
    if not given and not _address_of_name():
        if len(networks := _networks()) == 1:
            given = {VARIABLE: networks[0]}
        elif world.servers or not world.starts_horovod:  # MPI finds its own
            raise _unreachable()
    for variable, name in given.items():
        if name not in own_addresses().values():
            here, has = socket.gethostname(), ", ".join(sorted(set(own_addresses().values())))
            raise UsageError(f"{variable}={name}: {here} has no network interface {name} with an address; it has {has}")
        os.environ.update(dict.fromkeys(READ_BY, name) | {VARIABLE: name})
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
    return os.environ.get(VARIABLE, "")


def free_port(address: str) -> int:
    """A port on which nobody listens. The system hands out ports above: one of those might be another process's before
    a rank listens there; Ray's workers listen below. OSError where none is free.
    """
    for port in random.SystemRandom().sample(PORTS, 100):
        try:
            socket.create_server((address, port)).close()
            return port
        except OSError as error:
            refused = error
    raise refused


def new_wire_key() -> str:
    """A key for the ranks of one job."""
    import zmq

    return zmq.curve_keypair()[1].decode()


def own_address(world: World) -> str:
    """Where other ranks reach this one: loopback if nobody is elsewhere, else this host's address on the interface of
    use_one_interface, or where there is none what its name means.

    Raises:
        UsageError: the host's name does not lead others here.
    """
    if world.is_local:
        return "127.0.0.1"
    interface, by_name = os.environ.get(VARIABLE), _address_of_name()
    on_it = [address for address, its in own_addresses().items() if its == interface]
    if not on_it and not by_name:
        raise _unreachable()
    return on_it[0] if on_it and by_name not in on_it else by_name


def _address_of_name() -> str:
    """What this host's own name means, or empty where others do not reach that: Debian's hosts file has 127.0.1.1."""
    address = resolve(socket.gethostname())
    return "" if address.startswith("127.") else address


def resolve(host: str) -> str:
    """The IPv4 address that this machine has for a name, or an empty string."""
    try:
        return socket.gethostbyname(host)
    except OSError:
        return ""


def _networks() -> list[str]:
    return sorted({name for address, name in own_addresses().items() if not address.startswith("127.")})


def _unreachable() -> UsageError:
    return UsageError(
        f"this host's own name {socket.gethostname()} does not resolve, or means loopback: give it in /etc/hosts the "
        f"address that others reach, or set {VARIABLE} to one of its networks ({', '.join(_networks()) or 'none'})"
    )


def own_addresses() -> dict[str, str]:
    """The interface of each of this host's IPv4 addresses."""
    import psutil

    addresses = psutil.net_if_addrs().items()
    return {a.address: name for name, own in addresses for a in own if a.family == socket.AF_INET}
