"""The network over which ranks reach each other: one interface for all libraries."""

import os
import random
import re
import socket

from hvdtrain.base.errors import UsageError
from hvdtrain.base.world.place import World

VARIABLE = "HVDTRAIN_INTERFACE"
# The variable with the key of --wire zmq: 32 secret bytes in ZeroMQ's Z85, 40 characters.
WIRE_KEY = "HVDTRAIN_WIRE_KEY"
# The variables that libraries read: TensorPipe, which carries the servers' rpc; torch's Gloo;
# Horovod's Gloo; OpenMPI.
READ_BY = (
    "TP_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "HOROVOD_GLOO_IFACE",
    "OMPI_MCA_btl_tcp_if_include",
)
LOOPBACK = "lo"
PORTS = range(20_000, 32_000)
# An interface's name; neither a list of interfaces nor a network such as 10.0.0.0/8.
_NAME = re.compile(r"[\w.@-]+(:\w+)?")


def use_one_interface(world: World) -> str:
    """Makes all libraries use the same network interface. Call it before any opens a socket.

    The interface is the first that applies of:

    - loopback, if all ranks are on this host
    - HVDTRAIN_INTERFACE, which `hvdtrain launch` sets
    - the interface that a library's variable names, as horovodrun and mpirun set it
    - the only interface of this host, if others do not reach the host by its name: libraries would
      listen at the name's address

    Returns:
        The interface's name; empty if none applies, and each library chooses one.

    Raises:
        UsageError: variables name two interfaces, this host does not have the named one with an
            address, or others do not reach this host by its name and it has several networks.
    """
    if world.is_local:
        os.environ.update(dict.fromkeys(READ_BY[:3], LOOPBACK))  # MPI has shared memory
        # NCCL prefers other interfaces, at which other hosts could reach it.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={LOOPBACK}")
        return LOOPBACK
    given = _given_interfaces()
    if len(set(given.values())) > 1:
        named = " and ".join(f"{variable}={name}" for variable, name in given.items())
        raise UsageError(
            f"{named} name different networks for one job: set {VARIABLE} to the one that it is to "
            "use"
        )
    if not given and not _address_of_name():
        networks = _networks()
        if len(networks) == 1:
            given = {VARIABLE: networks[0]}
        elif world.servers or not world.starts_horovod:  # MPI finds an interface itself
            raise _unreachable()
    for variable, name in given.items():
        interfaces = set(own_addresses().values())
        if name not in interfaces:
            here = socket.gethostname()
            has = ", ".join(sorted(interfaces))
            raise UsageError(
                f"{variable}={name}: {here} has no network interface {name} with an address; it "
                f"has {has}"
            )
        os.environ.update(dict.fromkeys(READ_BY, name) | {VARIABLE: name})
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
    return os.environ.get(VARIABLE, "")


def _given_interfaces() -> dict[str, str]:
    """Returns the interfaces that variables of the environment name, by variable."""
    if os.environ.get(VARIABLE):
        return {VARIABLE: os.environ[VARIABLE]}
    given = {}
    for variable in READ_BY:
        name = os.environ.get(variable, "")
        if _NAME.fullmatch(name):
            given[variable] = name
    return given


def free_port(address: str) -> int:
    """Returns a port on which nobody listens.

    It is below the ports that the system hands out, one of which another process might get before a
    rank listens there, and above the ports of Ray's workers.

    Raises:
        OSError: no port is free.
    """
    for port in random.SystemRandom().sample(PORTS, 100):
        try:
            socket.create_server((address, port)).close()
            return port
        except OSError as error:
            refused = error
    raise refused


def new_wire_key() -> str:
    """Returns a new key for the ranks of one job."""
    from zmq.utils import z85

    return z85.encode(os.urandom(32)).decode()


def own_address(world: World) -> str:
    """Returns the address at which other ranks reach this one.

    It is loopback if all ranks are on this host. Otherwise it is this host's address on the
    interface of use_one_interface; without an interface, the address of the host's name.

    Raises:
        UsageError: other hosts do not reach this one by its name.
    """
    if world.is_local:
        return "127.0.0.1"
    interface = os.environ.get(VARIABLE)
    by_name = _address_of_name()
    on_interface = [address for address, name in own_addresses().items() if name == interface]
    if not on_interface and not by_name:
        raise _unreachable()
    if not on_interface or by_name in on_interface:
        return by_name
    return on_interface[0]


def _address_of_name() -> str:
    """Returns the address of this host's name; empty if other hosts do not reach it.

    Debian's hosts file has 127.0.1.1.
    """
    address = resolve(socket.gethostname())
    return "" if address.startswith("127.") else address


def resolve(host: str) -> str:
    """Returns the IPv4 address that a name has on this machine, or an empty string."""
    try:
        return socket.gethostbyname(host)
    except OSError:
        return ""


def _networks() -> list[str]:
    """Returns the sorted names of the interfaces that have an address other than loopback's."""
    addresses = own_addresses().items()
    return sorted({name for address, name in addresses if not address.startswith("127.")})


def _unreachable() -> UsageError:
    return UsageError(
        f"this host's own name {socket.gethostname()} does not resolve, or means loopback: give it "
        f"in /etc/hosts the address that others reach, or set {VARIABLE} to one of its networks "
        f"({', '.join(_networks()) or 'none'})"
    )


def own_addresses() -> dict[str, str]:
    """Returns the interface of each of this host's IPv4 addresses."""
    import psutil

    interfaces = {}
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family == socket.AF_INET:
                interfaces[address.address] = name
    return interfaces
