"""Virtual hosts on this machine with a network as slow as wanted: network namespaces with a name and an sshd each.

node1 … nodeN are connected by a bridge, on which this machine has an address too, so that `ssh node1` works from here
as it does from node2. A token bucket (tbf) limits their links in both directions, and a control group each, where that
is asked for, what their processes take of the cores. Their state is in /run and in those groups. What names them is
mounted over /etc/hosts and ssh's folder of settings, which stay as they are below. `down` removes all of it, whichever
process made it, and nothing of it outlives a reboot.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click

from hvdtrain.config.option_types import Real
from hvdtrain.errors import Failure, UsageError
from hvdtrain.system.cgroups import CGROUPS
from hvdtrain.world.network import resolve

STATE = Path("/run/hvdtrain-hosts")
INTERFACE = "hvdtrain0"  # has the same name on the nodes and here, as Horovod requires
NETWORK = "10.77.77"
THIS_HOST_NUMBER = 254  # the last byte of this machine's address in that network
HOSTS_FILE = Path("/etc/hosts")
SSH_CONFIGS = Path("/etc/ssh/ssh_config.d")
# What is mounted over these two, in STATE: by these names a mount is known as the testbed's.
HOSTS_COPY, SSH_COPY = "hvdtrain-etc-hosts", "hvdtrain-ssh-configs"
MOUNTS = Path("/proc/self/mountinfo")
MAX_NODES = 64
TOOLS = ("ip", "tc", "ssh", "ssh-keygen", "nsenter", "unshare", "mount")
SSHD = "/usr/sbin/sshd"
AVAILABLE_CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
START_TIMEOUT_S = 10.0
# Of the limit on cores. Much shorter than the kernel's tenth of a second, so that a limited host is like one with
# slower cores to short steps too; a host may run for no less than a millisecond of each.
CPU_PERIOD_US, LEAST_QUOTA_US = 10_000, 1_000


def running_nodes() -> list[str]:
    """The names of the nodes that are up."""
    return sorted((path.stem for path in STATE.glob("node*.pid")), key=lambda node: int(node[4:]))


def up(rates: Sequence[str], cpus: Sequence[float] = ()) -> None:
    """Make node1 … nodeN in place of earlier ones.

    Args:
        rates: of each node's link, each way, as tc writes it: `1gbit`, `100mbit`.
        cpus: cores' worth of time that each node's processes may take together; empty for no limit.

    Raises:
        UsageError: this cannot be done here; it says why.
        Failure: a step failed; what had been made is removed.
    """
    _check_possible()
    down()
    addresses = {f"node{n}": f"{NETWORK}.{n}" for n in range(1, len(rates) + 1)}
    _check_free(list(addresses))
    try:
        _limit_cpus(cpus)
        _make(addresses, rates)
    except BaseException:
        down()
        raise


def set_rate(node: str, rate: str) -> None:
    """Give a node's link another rate, each way, while jobs run."""
    bridge_end = f"hvdtrain-n{node.removeprefix('node')}"
    for device in (["-n", f"hvdtrain-{node}", INTERFACE], [bridge_end]):
        words = [*device[:-1], "qdisc", "replace", "dev", device[-1], "root"]
        _run("tc", *words, "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")


def down() -> None:
    """End what runs on the nodes and remove them; does nothing where there are none."""
    _check_possible()
    namespaces = [s for s in _output("ip", "netns", "list").split() if s.startswith("hvdtrain-node")]
    pids = [int(pid) for namespace in namespaces for pid in _output("ip", "netns", "pids", namespace).split()]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 3
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    for namespace in namespaces:
        subprocess.run(["ip", "netns", "del", namespace], check=False)
    for group in _cpu_groups().glob("hvdtrain-node*"):
        deadline = time.monotonic() + 3
        while group.exists() and time.monotonic() < deadline:  # a process that has just ended is in it for a moment
            with contextlib.suppress(OSError):
                group.rmdir()
            time.sleep(0.01)
    for link in _output("ip", "-o", "link", "show").splitlines():
        interface = link.split(": ")[1].split("@")[0]
        if interface == INTERFACE or interface.startswith("hvdtrain-n"):
            subprocess.run(["ip", "link", "del", interface], check=False, stderr=subprocess.DEVNULL)
    for place in mounted():
        _run("umount", "--lazy", place)
    shutil.rmtree(STATE, ignore_errors=True)


def _check_possible() -> None:
    if os.geteuid():
        raise UsageError("`hvdtrain hosts` makes network interfaces, which only root may: use sudo")
    missing = [tool for tool in TOOLS if not shutil.which(tool)] + ([] if Path(SSHD).exists() else ["sshd"])
    if missing:
        raise UsageError(
            f"`hvdtrain hosts` needs {', '.join(missing)} (Debian: apt install iproute2 openssh-client openssh-server)"
        )


def _check_free(nodes: Sequence[str]) -> None:
    """UsageError where this machine knows other hosts by these names, or reaches others in their network."""
    with ThreadPoolExecutor(len(nodes)) as pool:  # a name that there is not may take seconds
        known = [
            f"{node} is {address}" for node, address in zip(nodes, pool.map(resolve, nodes), strict=True) if address
        ]
    if known:
        raise UsageError(f"`hvdtrain hosts` would hide other hosts of the same name: here {', '.join(known)}")
    network = f"{NETWORK}.0/24"
    routes = [_output("ip", "route", "show", which, network) for which in ("root", "match")]
    if others := [route for route in "".join(routes).splitlines() if not route.startswith("default")]:
        raise UsageError(f"`hvdtrain hosts` would hide other hosts in {network}: `ip route` has {others[0].strip()}")


def _make(addresses: Mapping[str, str], rates: Sequence[str]) -> None:
    STATE.mkdir(mode=0o700, parents=True)
    for key in ("key", "host_key"):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "hvdtrain hosts", "-f", str(STATE / key))
    shutil.copy(STATE / "key.pub", STATE / "authorized_keys")
    _name(addresses)
    # The congestion control that Linux ships with, whatever this machine uses: BBR all but stops for 0.2 s in every
    # 10 s, so that what a short job measures would depend on when it began.
    has_cubic = "cubic" in AVAILABLE_CONGESTION_CONTROL.read_text().split()
    _run("ip", "link", "add", INTERFACE, "type", "bridge")
    _run("ip", "addr", "add", f"{NETWORK}.{THIS_HOST_NUMBER}/24", "dev", INTERFACE)
    _run("ip", "link", "set", INTERFACE, "up")
    for number, (node, address) in enumerate(addresses.items(), 1):
        namespace, bridge_end = f"hvdtrain-{node}", f"hvdtrain-n{number}"
        _run("ip", "netns", "add", namespace)
        _run("ip", "link", "add", bridge_end, "type", "veth", "peer", "name", INTERFACE, "netns", namespace)
        _run("ip", "link", "set", bridge_end, "master", INTERFACE, "up")
        _run("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", INTERFACE)
        _run("ip", "-n", namespace, "link", "set", "lo", "up")
        _run("ip", "-n", namespace, "link", "set", INTERFACE, "up")
        set_rate(node, rates[number - 1])
        if has_cubic:
            route = f"{NETWORK}.0/24", "dev", INTERFACE, "proto", "kernel", "scope", "link"
            _run("ip", "-n", namespace, "route", "change", *route, "congctl", "cubic")
        _start_sshd(node, address)
    for node, address in addresses.items():
        _wait_for(node, address)


def _name(addresses: Mapping[str, str]) -> None:
    """Have this machine know the nodes by name, and its ssh reach them: by copies, mounted over what it has."""
    names, configs = STATE / HOSTS_COPY, STATE / SSH_COPY
    lines = "".join(f"{address} {node}\n" for node, address in addresses.items())
    shutil.copy(HOSTS_FILE, names)
    names.write_text(f"{HOSTS_FILE.read_text().rstrip()}\n{lines}")
    SSH_CONFIGS.mkdir(parents=True, exist_ok=True)
    shutil.copytree(SSH_CONFIGS, configs)
    (configs / "hvdtrain-hosts.conf").write_text(
        f"Host {' '.join(addresses)}\n  User root\n  IdentityFile {STATE}/key\n  IdentitiesOnly yes\n"
        "  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
    )
    for copy, place in ((names, HOSTS_FILE), (configs, SSH_CONFIGS)):
        _run("mount", "--bind", str(copy), str(place))


def mounted() -> list[str]:
    """What the testbed has mounted something over, as often as it has."""
    places = (line.split()[3:5] for line in MOUNTS.read_text().splitlines())
    return [place for root, place in places if f"/{HOSTS_COPY}" in root or f"/{SSH_COPY}" in root]


def _cpu_groups() -> Path:
    """Where control groups that limit processor time are: of version 2, or of version 1's controller `cpu`."""
    return CGROUPS if (CGROUPS / "cgroup.controllers").exists() else CGROUPS / "cpu"


def _limit_cpus(cpus: Sequence[float]) -> None:
    """Make a control group for each node, whose processes may take so many cores' worth of time."""
    top = _cpu_groups()
    try:
        # It stays handed down to groups below, as systemd has it anyway: others may rely on that by the time of down().
        delegated = top / "cgroup.subtree_control"
        if cpus and delegated.exists() and "cpu" not in delegated.read_text().split():
            delegated.write_text("+cpu")
        for number, cores in enumerate(cpus, 1):
            period = max(CPU_PERIOD_US, round(LEAST_QUOTA_US / cores))
            group, quota = top / f"hvdtrain-node{number}", round(cores * period)
            group.mkdir()
            if top == CGROUPS:
                (group / "cpu.max").write_text(f"{quota} {period}")
            else:
                (group / "cpu.cfs_period_us").write_text(str(period))
                (group / "cpu.cfs_quota_us").write_text(str(quota))
    except (OSError, ValueError) as error:
        raise UsageError(f"--cpus needs control groups with the controller `cpu`: {error}") from None


def _start_sshd(node: str, address: str) -> None:
    """Start an sshd in the node's namespaces, in which the host name is the node's too."""
    Path("/run/sshd").mkdir(exist_ok=True)
    settings = {
        "ListenAddress": address, "HostKey": f"{STATE}/host_key", "AuthorizedKeysFile": f"{STATE}/authorized_keys",
        "PidFile": f"{STATE}/{node}.pid", "PermitRootLogin": "prohibit-password", "PasswordAuthentication": "no",
        "UsePAM": "no", "StrictModes": "no", "MaxStartups": "100", "MaxSessions": "100", "PrintMotd": "no",
    }  # fmt: skip
    config = STATE / f"{node}.conf"
    config.write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
    script = f'hostname {node} && exec {SSHD} -f "{config}" -E "{STATE}/{node}.log"'
    # `ip netns exec` would mount /sys anew, without the control groups, by which processes know their cores.
    words = ["nsenter", f"--net=/run/netns/hvdtrain-{node}", "unshare", "--uts", "--mount", "sh", "-c", script]
    members = _cpu_groups() / f"hvdtrain-{node}" / "cgroup.procs"
    join = f"echo $$ > {members} && " if members.exists() else ""  # what sshd starts is in its group too
    _run("sh", "-c", f'{join}exec "$@"', "sh", *words)


def _wait_for(node: str, address: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((address, 22), timeout=1):
            if (STATE / f"{node}.pid").exists():  # sshd writes it a moment after it begins to listen
                return
        time.sleep(0.05)
    log = STATE / f"{node}.log"
    raise Failure(f"the sshd of {node} does not answer: {log.read_text().strip()[-200:] if log.exists() else 'no log'}")


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        output = (done.stderr or done.stdout).strip().splitlines()
        raise Failure(f"`{' '.join(words[:6])} …` failed: {output[-1] if output else done.returncode}")


def _output(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True).stdout


# `hvdtrain hosts`


@click.group("hosts")
def hosts() -> None:
    """Make hosts on this machine, joined by a network as slow as you like, to try jobs over several hosts.

    \b
      hvdtrain hosts up --count 2 --rate 1gbit
      hvdtrain compare -H node1:2,node2:2 --modes allreduce,ps-async --steps 20
      ssh node1 ip addr
      hvdtrain hosts down

    All of these as root. node1 … nodeN are network namespaces with a name and an sshd each, which share this machine's
    files, cores and memory. `ssh node1` works from here and between them. Where other hosts have such names, or such
    addresses (10.77.77.1 …), it is refused.
    """


@hosts.command()
@click.option(
    "--count",
    type=click.IntRange(1, MAX_NODES),
    help="How many  [default: 2, or as many as there are rates or --cpus].",
)
@click.option(
    "--rate", default="1gbit", show_default=True,
    help="Of each host's link, each way, in tc's words; one for each host by commas: 1gbit,1gbit,100mbit.",
)  # fmt: skip
@click.option(
    "--cpus", default="",
    help="Cores that each host's processes may take together, by commas: 1,1,0.5. By a control group: what is over "
    "that stands still for the rest of each hundredth of a second  [default: no limit].",
)  # fmt: skip
def up_command(count: int | None, rate: str, cpus: str) -> None:
    """Make node1 … nodeN, in place of what there was."""
    rates = [_checked(word) for word in rate.split(",")]
    take: click.ParamType = Real(0.01, 1024)  # the first is the kernel's shortest quota
    cores = [take.convert(word, None, None) for word in cpus.split(",")] if cpus else []
    number = count or max(2, len(rates), len(cores))
    for option, given in (("--rate", rates), ("--cpus", cores)):
        if len(given) > 1 and len(given) != number:
            raise UsageError(f"{option} has {len(given)} values for {number} hosts")
    up(rates * number if len(rates) == 1 else rates, cores * number if len(cores) == 1 else cores)
    limited = f", {cpus} cores" if cpus else ""
    click.echo(f"{', '.join(running_nodes())} are up, {rate} each way{limited}; `hvdtrain hosts down` removes them")


@hosts.command("rate", short_help="Give a host's link another rate.")
@click.argument("node")
@click.argument("rate")
def rate_command(node: str, rate: str) -> None:
    """Give a host's link another rate, each way, while jobs run: `hvdtrain hosts rate node2 50mbit`."""
    if node not in (nodes := running_nodes()):
        raise UsageError(f"there is no {node}: {', '.join(nodes) or 'none'} are up; see `hvdtrain hosts up --help`")
    set_rate(node, _checked(rate))
    click.echo(f"{node} has {rate} each way")


def _checked(rate: str) -> str:
    if not re.fullmatch(r"\d+(\.\d+)?([kmgt]?bit|[kmgt]?bps)", rate):
        raise UsageError(f"--rate {rate} is not a rate such as 1gbit or 100mbit")
    return rate


@hosts.command("down")
def down_command() -> None:
    """Remove the hosts, and end what runs on them."""
    down()
    click.echo("no hosts are left")
