"""`hvdtrain`, whose jobs' ranks are forked: see forked_jobs.py.

python forked_launch.py SOCKET launch …
"""

import dataclasses
import sys
from pathlib import Path

from hvdtrain.cli import main
from hvdtrain.launch import prepare

PROXY = Path(__file__).with_name("fork_proxy.py")


def through_proxy(place: Path, program: list[str]) -> list[str]:
    """The command that has a program of ours forked by the server whose socket that is."""
    return [sys.executable, "-S", "-E", "-P", str(PROXY), str(place), *program]


def fork_ranks(place: str) -> None:
    """Have the ranks of the jobs that this process starts forked by the server at that socket."""
    expand = prepare.expand

    def through_proxies(launcher, spec):
        return expand(launcher, dataclasses.replace(spec, program=through_proxy(Path(place), spec.program)))

    prepare.expand = through_proxies


if __name__ == "__main__":
    fork_ranks(sys.argv.pop(1))
    main()
