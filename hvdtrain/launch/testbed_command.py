"""`hvdtrain hosts`: makes and removes the virtual hosts of `testbed.py`."""

import re

import click

from hvdtrain.errors import UsageError
from hvdtrain.launch import testbed


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
    type=click.IntRange(1, testbed.MAX_NODES),
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
def up(count: int | None, rate: str, cpus: str) -> None:
    """Make node1 … nodeN, in place of what there was."""
    rates = [_checked(word) for word in rate.split(",")]
    take: click.ParamType = click.FloatRange(0.01, 1024)  # the first is the kernel's shortest quota
    cores = [take.convert(word, None, None) for word in cpus.split(",")] if cpus else []
    number = count or max(2, len(rates), len(cores))
    for option, given in (("--rate", rates), ("--cpus", cores)):
        if len(given) > 1 and len(given) != number:
            raise UsageError(f"{option} has {len(given)} values for {number} hosts")
    testbed.up(rates * number if len(rates) == 1 else rates, cores * number if len(cores) == 1 else cores)
    limited = f", {cpus} cores" if cpus else ""
    click.echo(
        f"{', '.join(testbed.running_nodes())} are up, {rate} each way{limited}; `hvdtrain hosts down` removes them"
    )


@hosts.command("rate", short_help="Give a host's link another rate.")
@click.argument("node")
@click.argument("rate")
def change_rate(node: str, rate: str) -> None:
    """Give a host's link another rate, each way, while jobs run: `hvdtrain hosts rate node2 50mbit`."""
    if node not in (nodes := testbed.running_nodes()):
        raise UsageError(f"there is no {node}: {', '.join(nodes) or 'none'} are up; see `hvdtrain hosts up --help`")
    testbed.set_rate(node, _checked(rate))
    click.echo(f"{node} has {rate} each way")


def _checked(rate: str) -> str:
    if not re.fullmatch(r"\d+(\.\d+)?([kmgt]?bit|[kmgt]?bps)", rate):
        raise UsageError(f"--rate {rate} is not a rate such as 1gbit or 100mbit")
    return rate


@hosts.command()
def down() -> None:
    """Remove the hosts, and end what runs on them."""
    testbed.down()
    click.echo("no hosts are left")
