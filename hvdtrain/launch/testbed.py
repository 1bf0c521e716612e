"""Virtual hosts on this machine: network namespaces with a name, an sshd and a limited link each.

node1 … nodeN, or with `--prefix lab` lab1 … labN, are a set. They are connected by a bridge, on
which this machine has an address too, so that `ssh node1` works from here as it does from node2. A
token bucket (tbf) limits each link in both directions. If asked for, a control group limits the
cores of each node's processes. State is in /run and in those groups. Files with the nodes' names
are mounted over /etc/hosts and ssh's folder of settings, which stay unchanged below. `down` removes
a set, whichever process made it, and with the last one the mounts. Nothing of it outlives a reboot.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import click
import psutil
from filelock import FileLock

from hvdtrain.base.config.option_types import Real
from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.base.formatting import printable, with_noun
from hvdtrain.base.system.cgroups import CGROUPS
from hvdtrain.base.world.network import resolve

STATE = Path("/run/hvdtrain-hosts")
LOCK = Path("/run/hvdtrain-hosts.lock")
INTERFACE = "hvdtrain0"  # of the set `node`; see NodeSet
NETWORK = "10.77.77"  # of the set `node`
OTHER_NETWORKS = [f"10.77.{number}" for number in range(78, 98)]  # of other sets
PREFIX = re.compile("[a-z][a-z0-9]{0,6}[a-z]|[a-z]")  # what a set's names begin with
THIS_HOST_NUMBER = 254  # the last byte of this machine's address in that network
HOSTS_FILE = Path("/etc/hosts")
SSH_CONFIGS = Path("/etc/ssh/ssh_config.d")
# Names, in STATE, of the copies that are mounted over these two. They identify our mounts.
HOSTS_COPY = "hvdtrain-etc-hosts"
SSH_COPY = "hvdtrain-ssh-configs"
MOUNTS = Path("/proc/self/mountinfo")
MAX_NODES = 64
TOOLS = ("ip", "tc", "ssh", "ssh-keygen", "nsenter", "unshare", "mount")
SSHD = "/usr/sbin/sshd"
AVAILABLE_CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
START_TIMEOUT_S = 10.0
# The period of the limit on cores. It is much shorter than the kernel's tenth of a second, so that
# a limited host is like one with slower cores to short steps too.
CPU_PERIOD_US = 10_000
# The least time that a host may run within a period.
LEAST_QUOTA_US = 1_000


@dataclass(frozen=True)
class NodeSet:
    """Nodes that are made and removed together: `prefix` and a number from 1 is the name of each."""

    prefix: str = "node"

    @property
    def interface(self) -> str:
        """The interface's name, the same on the nodes and here, as Horovod requires."""
        return INTERFACE if self.prefix == "node" else f"hvd-{self.prefix}"

    def bridge_end(self, number: int) -> str:
        """Returns the interface that the bridge has of a node."""
        return f"hvdtrain-n{number}" if self.prefix == "node" else f"hvd-{self.prefix}-{number}"

    def has(self, name: str) -> bool:
        """Returns whether a node's name is of this set."""
        return bool(re.fullmatch(rf"{self.prefix}\d+", name))

    def owns_link(self, interface: str) -> bool:
        """Returns whether an interface of this machine is of this set."""
        of_nodes = re.escape(self.bridge_end(0)[:-1])
        return interface == self.interface or bool(re.fullmatch(rf"{of_nodes}\d+", interface))


def set_of(node: str) -> NodeSet:
    """Returns the set that a node of this name is in."""
    return NodeSet(node.rstrip("0123456789"))


def running_nodes() -> list[str]:
    """Returns the names of the nodes that are up, of all sets."""
    names = [path.stem for path in STATE.glob("*.pid")]
    return sorted(names, key=lambda name: (len(name), name))


def up(rates: Sequence[str], cpus: Sequence[float] = (), nodes: NodeSet = NodeSet()) -> None:
    """Makes the nodes of a set in place of earlier ones.

    Args:
        rates: the throughput of each node's link in each direction, in tc's words: `1gbit`,
            `100mbit`.
        cpus: how many cores' time each node's processes may take together; empty for no limit.

    Raises:
        UsageError: this is not possible here. The message says why.
        Failure: a step failed. The nodes that had been made are removed.
    """
    _check_possible()
    down(nodes)
    network = _free_network(nodes)
    addresses = {f"{nodes.prefix}{n}": f"{network}.{n}" for n in range(1, len(rates) + 1)}
    _check_free(list(addresses), network)
    try:
        _limit_cpus(cpus, nodes)
        _make(addresses, rates, nodes, network)
    except BaseException:
        down(nodes)
        raise


def jobs_on(nodes: NodeSet) -> list[str]:
    """Returns the commands that run on a set's nodes, beside the sshd of each, once each."""
    commands: dict[str, None] = {}  # as an ordered set
    for node in filter(nodes.has, _namespaces()):
        for word in _output("ip", "netns", "pids", f"hvdtrain-{node}").split():
            with contextlib.suppress(psutil.Error):
                words = psutil.Process(int(word)).cmdline()
                if words and not words[0].startswith((SSHD, "sshd")):
                    commands[" ".join(words)] = None
    return list(commands)


def set_rate(node: str, rate: str) -> None:
    """Gives a node's link another rate, in each direction, while jobs run."""
    nodes = set_of(node)
    number = int(node.removeprefix(nodes.prefix))
    node_end = ["-n", f"hvdtrain-{node}", "qdisc", "replace", "dev", nodes.interface]
    bridge_end = ["qdisc", "replace", "dev", nodes.bridge_end(number)]
    limit = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
    for device in (node_end, bridge_end):
        _run("tc", *device, *limit)


def down(nodes: NodeSet = NodeSet()) -> None:
    """Ends all processes on a set's nodes and removes the nodes, if there are any."""
    _check_possible()
    namespaces = [f"hvdtrain-{node}" for node in _namespaces() if nodes.has(node)]
    _kill_processes(namespaces)
    for namespace in namespaces:
        subprocess.run(["ip", "netns", "del", namespace], check=False)
    for group in _cpu_groups().glob(f"hvdtrain-{nodes.prefix}*"):
        if not nodes.has(group.name.removeprefix("hvdtrain-")):
            continue
        deadline = time.monotonic() + 3
        # A process that has just ended stays in its group for a moment.
        while group.exists() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                group.rmdir()
            time.sleep(0.01)
    for link in _output("ip", "-o", "link", "show").splitlines():
        interface = link.split(": ")[1].split("@")[0]
        if nodes.owns_link(interface):
            subprocess.run(["ip", "link", "del", interface], check=False, stderr=subprocess.DEVNULL)
    if _namespaces():  # of other sets
        _forget(nodes)
        return
    for place in mounted():
        _run("umount", "--lazy", place)
    shutil.rmtree(STATE, ignore_errors=True)


def _forget(nodes: NodeSet) -> None:
    """Removes what the copies of this machine's files, and STATE, have of a set."""
    names = STATE / HOSTS_COPY
    if not names.exists():
        return
    lines = names.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if not line.endswith(f"  # hvdtrain hosts: {nodes.prefix}")]
    names.write_text("\n".join(kept) + "\n", encoding="utf-8")
    (STATE / SSH_COPY / nodes_config(nodes)).unlink(missing_ok=True)
    for path in STATE.glob(f"{nodes.prefix}*"):
        if nodes.has(path.stem):
            path.unlink(missing_ok=True)


def _namespaces() -> list[str]:
    """Returns the names of all nodes that are there, of all sets."""
    words = _output("ip", "netns", "list").split()
    return [word.removeprefix("hvdtrain-") for word in words if word.startswith("hvdtrain-")]


def _free_network(nodes: NodeSet) -> str:
    """Returns a network that no other set has.

    Raises:
        UsageError: there are as many sets as networks.
    """
    if nodes.prefix == "node":
        return NETWORK
    addresses = _output("ip", "-o", "addr", "show")
    free = [network for network in OTHER_NETWORKS if f" {network}." not in addresses]
    if not free:
        raise UsageError("`hvdtrain hosts` has no network left: remove a set of hosts first")
    return free[0]


def _kill_processes(namespaces: Sequence[str]) -> None:
    """Kills all processes in the namespaces, and blocks for some seconds until they are gone."""
    pids: list[int] = []
    for namespace in namespaces:
        pids += map(int, _output("ip", "netns", "pids", namespace).split())
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 3
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)


def _check_possible() -> None:
    if os.geteuid():
        raise UsageError("`hvdtrain hosts` makes network interfaces, which only root may: use sudo")
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if not Path(SSHD).exists():
        missing.append("sshd")
    if missing:
        raise UsageError(
            f"`hvdtrain hosts` needs {', '.join(missing)} (Debian: apt install iproute2 "
            "openssh-client openssh-server)"
        )


def _check_free(nodes: Sequence[str], network: str) -> None:
    """Checks that this machine knows no other hosts by these names or in their network.

    Raises:
        UsageError: it does.
    """
    with ThreadPoolExecutor(len(nodes)) as pool:  # resolving an unknown name may take seconds
        addresses = zip(nodes, pool.map(resolve, nodes), strict=True)
        known = [f"{node} is {address}" for node, address in addresses if address]
    if known:
        raise UsageError(
            f"`hvdtrain hosts` would hide other hosts of the same name: here {', '.join(known)}"
        )
    network = f"{network}.0/24"
    within = _output("ip", "route", "show", "root", network)
    around = _output("ip", "route", "show", "match", network)
    routes = (within + around).splitlines()
    others = [route for route in routes if not route.startswith("default")]
    if others:
        raise UsageError(
            f"`hvdtrain hosts` would hide other hosts in {network}: `ip route` has "
            f"{others[0].strip()}"
        )


def _make(addresses: Mapping[str, str], rates: Sequence[str], nodes: NodeSet, network: str) -> None:
    interface = nodes.interface
    if not STATE.exists():
        _make_state()
    _name(addresses, nodes)
    # Links use cubic, Linux's default, whatever this machine uses. BBR all but stops for 0.2 s in
    # every 10 s, so that figures of a short job would depend on when it began.
    has_cubic = "cubic" in AVAILABLE_CONGESTION_CONTROL.read_text(encoding="utf-8").split()
    _run("ip", "link", "add", interface, "type", "bridge")
    _run("ip", "addr", "add", f"{network}.{THIS_HOST_NUMBER}/24", "dev", interface)
    _run("ip", "link", "set", interface, "up")
    for number, (node, address) in enumerate(addresses.items(), 1):
        namespace = f"hvdtrain-{node}"
        bridge_end = nodes.bridge_end(number)
        node_end = ["name", interface, "netns", namespace]
        _run("ip", "netns", "add", namespace)
        _run("ip", "link", "add", bridge_end, "type", "veth", "peer", *node_end)
        _run("ip", "link", "set", bridge_end, "master", interface, "up")
        _run("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", interface)
        _run("ip", "-n", namespace, "link", "set", "lo", "up")
        _run("ip", "-n", namespace, "link", "set", interface, "up")
        set_rate(node, rates[number - 1])
        if has_cubic:
            route = f"{network}.0/24", "dev", interface, "proto", "kernel", "scope", "link"
            _run("ip", "-n", namespace, "route", "change", *route, "congctl", "cubic")
        _start_sshd(node, address)
    for node, address in addresses.items():
        _wait_for(node, address)


def _make_state() -> None:
    """Makes the keys of all sets, and mounts copies of host names and ssh settings over the files."""
    STATE.mkdir(mode=0o700, parents=True)
    for key in ("key", "host_key"):
        options = ["-q", "-t", "ed25519", "-N", "", "-C", "hvdtrain hosts"]
        _run("ssh-keygen", *options, "-f", str(STATE / key))
    shutil.copy(STATE / "key.pub", STATE / "authorized_keys")
    names = STATE / HOSTS_COPY
    configs = STATE / SSH_COPY
    shutil.copy(HOSTS_FILE, names)
    SSH_CONFIGS.mkdir(parents=True, exist_ok=True)
    shutil.copytree(SSH_CONFIGS, configs)
    for copy, place in ((names, HOSTS_FILE), (configs, SSH_CONFIGS)):
        _run("mount", "--bind", str(copy), str(place))


def nodes_config(nodes: NodeSet) -> str:
    """Returns the name of the file with ssh's settings for a set."""
    return f"hvdtrain-hosts-{nodes.prefix}.conf"


def _name(addresses: Mapping[str, str], nodes: NodeSet) -> None:
    """Adds the nodes to this machine's host names and ssh settings, in the copies of the files."""
    names = STATE / HOSTS_COPY
    lines = [
        f"{address} {node}  # hvdtrain hosts: {nodes.prefix}\n"
        for node, address in addresses.items()
    ]
    before = names.read_text(encoding="utf-8").rstrip()
    names.write_text(f"{before}\n{''.join(lines)}", encoding="utf-8")
    (STATE / SSH_COPY / nodes_config(nodes)).write_text(
        f"Host {' '.join(addresses)}\n  User root\n  IdentityFile {STATE}/key\n  IdentitiesOnly "
        "yes\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n",
        encoding="utf-8",
    )


def mounted() -> list[str]:
    """Returns the places over which the testbed has mounted its copies, one for each mount."""
    places = []
    for line in MOUNTS.read_text(encoding="utf-8").splitlines():
        root, place = line.split()[3:5]
        if f"/{HOSTS_COPY}" in root or f"/{SSH_COPY}" in root:
            places.append(place)
    return places


def _cpu_groups() -> Path:
    """Returns the folder of control groups that limit processor time, of version 2 or 1."""
    return CGROUPS if (CGROUPS / "cgroup.controllers").exists() else CGROUPS / "cpu"


def _limit_cpus(cpus: Sequence[float], nodes: NodeSet = NodeSet()) -> None:
    """Makes a control group for each node, which limits how many cores' time it may take."""
    top = _cpu_groups()
    try:
        # down() leaves the controller handed down to groups below, as systemd does anyway, since
        # others may rely on it by then.
        delegated = top / "cgroup.subtree_control"
        if (
            cpus
            and delegated.exists()
            and "cpu" not in delegated.read_text(encoding="utf-8").split()
        ):
            delegated.write_text("+cpu", encoding="utf-8")
        for number, cores in enumerate(cpus, 1):
            period = max(CPU_PERIOD_US, round(LEAST_QUOTA_US / cores))
            quota = round(cores * period)
            group = top / f"hvdtrain-{nodes.prefix}{number}"
            group.mkdir()
            if top == CGROUPS:
                (group / "cpu.max").write_text(f"{quota} {period}", encoding="utf-8")
            else:
                (group / "cpu.cfs_period_us").write_text(str(period), encoding="utf-8")
                (group / "cpu.cfs_quota_us").write_text(str(quota), encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--cpus needs control groups with the controller `cpu`: {error}"
        ) from None


def _start_sshd(node: str, address: str) -> None:
    """Starts an sshd in the node's namespaces, in which the host name is the node's too."""
    Path("/run/sshd").mkdir(exist_ok=True)
    settings = {
        "ListenAddress": address,
        "HostKey": f"{STATE}/host_key",
        "AuthorizedKeysFile": f"{STATE}/authorized_keys",
        "PidFile": f"{STATE}/{node}.pid",
        "PermitRootLogin": "prohibit-password",
        "PasswordAuthentication": "no",
        "UsePAM": "no",
        "StrictModes": "no",
        "MaxStartups": "100",
        "MaxSessions": "100",
        "PrintMotd": "no",
    }
    config = STATE / f"{node}.conf"
    config.write_text(
        "".join(f"{key} {value}\n" for key, value in settings.items()), encoding="utf-8"
    )
    script = f'hostname {node} && exec {SSHD} -f "{config}" -E "{STATE}/{node}.log"'
    # `ip netns exec` would mount /sys anew, without the control groups, by which processes know
    # their cores.
    enter = ["nsenter", f"--net=/run/netns/hvdtrain-{node}", "unshare", "--uts", "--mount"]
    # Children of sshd are in its group too.
    members = _cpu_groups() / f"hvdtrain-{node}" / "cgroup.procs"
    join = f"echo $$ > {members} && " if members.exists() else ""
    _run("sh", "-c", f'{join}exec "$@"', "sh", *enter, "sh", "-c", script)


def _wait_for(node: str, address: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((address, 22), timeout=1):
            # sshd writes the file a moment after it begins to listen.
            if (STATE / f"{node}.pid").exists():
                return
        time.sleep(0.05)
    log = STATE / f"{node}.log"
    raise Failure(
        f"the sshd of {node} does not answer: "
        f"{log.read_text(encoding='utf-8').strip()[-200:] if log.exists() else 'no log'}"
    )


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, encoding="utf-8", errors="replace")
    if done.returncode:
        output = (done.stderr or done.stdout).strip().splitlines()
        raise Failure(
            f"`{' '.join(words[:6])} …` failed: {output[-1] if output else done.returncode}"
        )


def _output(*words: str) -> str:
    return subprocess.run(words, capture_output=True, encoding="utf-8", errors="replace").stdout


# `hvdtrain hosts`


PREFIX_OPTION = click.option(
    "--prefix",
    default="node",
    show_default=True,
    metavar="NAME",
    help="What the hosts' names begin with. Hosts of another prefix stay as they are.",
)
FORCE_OPTION = click.option(
    "--force", is_flag=True, help="End what runs on hosts of these names, which are replaced."
)


@click.group("hosts")
def hosts() -> None:
    """Make hosts on this machine, joined by a network as slow as you like, to try jobs over several
    hosts.

    \b
      hvdtrain hosts up --count 2 --rate 1gbit
      hvdtrain compare -H node1:2,node2:2 --modes allreduce,ps-async --steps 20
      ssh node1 ip addr
      hvdtrain hosts down

    All of these as root. node1 … nodeN are network namespaces with a name and an sshd each, which
    share this machine's files, cores and memory. `ssh node1` works from here and between them.
    `up` is refused where other hosts have such names, or such addresses (10.77.77.1 …). `up
    --prefix lab` makes lab1 … labN beside them: a set of its own, for another user or job.
    """


@hosts.command()
@click.option(
    "--count",
    type=click.IntRange(1, MAX_NODES),
    help="How many  [default: 2, or as many as there are rates or --cpus].",
)
@click.option(
    "--rate",
    default="1gbit",
    show_default=True,
    help="Rate of each host's link, each way, in the units of tc: `bit` are bits a second, `bps` "
    "bytes. One for each host by commas: 1gbit,1gbit,100mbit.",
)
@click.option(
    "--cpus",
    default="",
    help="Cores that each host's processes may take together, by commas: 1,1,0.5. Above the limit "
    "processes pause for the rest of each 10 ms (a control group)  [default: no limit].",
)
@PREFIX_OPTION
@FORCE_OPTION
def up_command(count: int | None, rate: str, cpus: str, prefix: str, force: bool) -> None:
    """Make node1 … nodeN. They replace hosts of the same names, unless a job runs there."""
    nodes = _set_named(prefix)
    rates = [_checked(word) for word in rate.split(",")]
    number_of_cores: click.ParamType = Real(0.01, 1024)  # from the kernel's shortest quota
    words = cpus.split(",") if cpus else []
    cores = [number_of_cores.convert(word, None, None) for word in words]
    number = count or max(2, len(rates), len(cores))
    for option, given in (("--rate", rates), ("--cpus", cores)):
        if len(given) > 1 and len(given) != number:
            raise UsageError(f"{option} has {len(given)} values for {number} hosts")
    if len(rates) == 1:
        rates *= number
    if len(cores) == 1:
        cores *= number
    with exclusive():
        _check_unused(nodes, "up", force)
        up(rates, cores, nodes)
    limited = f", {cpus} cores" if cpus else ""
    of_set = "" if prefix == "node" else f" --prefix {prefix}"
    names = ", ".join(filter(nodes.has, running_nodes()))
    click.echo(
        f"{names} are up, {_in_bits(rate)} each way{limited}; `hvdtrain hosts down{of_set}` removes "
        "them"
    )
    if not cpus:
        share = (os.cpu_count() or 1) / number
        click.echo(
            f"the hosts share this machine's cores: `--cpus {share:.2g}` gives each host its own "
            "part"
        )


@hosts.command("rate", short_help="Give a host's link another rate.")
@click.argument("node")
@click.argument("rate")
def rate_command(node: str, rate: str) -> None:
    """Give a host's link another rate, each way, while jobs run: `hvdtrain hosts rate node2
    50mbit`.
    """
    nodes = running_nodes()
    if node not in nodes:
        raise UsageError(
            f"there is no {node}: {', '.join(nodes) or 'none'} are up; see `hvdtrain hosts up "
            "--help`"
        )
    set_rate(node, _checked(rate))
    click.echo(f"{node} has {_in_bits(rate)} each way")


def _checked(rate: str) -> str:
    is_rate = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?bit|[kmgt]?bps)", rate)
    if not is_rate or not float(is_rate[1]):
        raise UsageError(f"--rate {rate} is not a rate such as 1gbit or 100mbit")
    return rate


def _in_bits(rates: str) -> str:
    """Returns rates by commas, each in bytes with what it comes to: tc's `bps` are bytes."""
    return ",".join(_one_in_bits(rate) for rate in rates.split(","))


def _one_in_bits(rate: str) -> str:
    if not rate.endswith("bps"):
        return rate
    unit = rate.lstrip("0123456789.")
    bits = 8 * float(rate.removesuffix(unit))
    return f"{rate} (tc's bytes a second: {bits:g}{unit.removesuffix('bps')}bit)"


@hosts.command("down")
@PREFIX_OPTION
def down_command(prefix: str) -> None:
    """Remove the hosts, and end what runs on them."""
    with exclusive():
        down(_set_named(prefix))
    left = running_nodes()
    click.echo(f"{', '.join(left)} are left" if left else "no hosts are left")


def _set_named(prefix: str) -> NodeSet:
    if not PREFIX.fullmatch(prefix):
        raise UsageError(
            f"--prefix {prefix}: take at most 8 small letters and digits, with a letter at both ends"
        )
    return NodeSet(prefix)


def _check_unused(nodes: NodeSet, command: str, force: bool) -> None:
    """Raises UsageError where processes run on the nodes, unless they are to be ended."""
    jobs = [] if force else jobs_on(nodes)
    if jobs:
        raise UsageError(
            f"{with_noun(len(jobs), 'command')} on the hosts that are up would be ended, such as "
            f"`{printable(jobs[0])[:120]}`: make hosts of another name, `hosts {command} --prefix "
            "lab`, wait, or give --force"
        )


@contextlib.contextmanager
def exclusive() -> Iterator[None]:
    """Holds a lock within the block: one process makes or removes hosts at a time."""
    _check_possible()
    with FileLock(LOCK):
        yield
