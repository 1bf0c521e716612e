"""`hvdtrain`, whose jobs' ranks are forked from a spare process: see spare.py.

python with_spare.py SOCKET launch …
"""

import dataclasses
import sys
from pathlib import Path

from hvdtrain.cli import main
from hvdtrain.launch import prepare
from hvdtrain.launch.spare_ranks import through_stand_in


def fork_ranks(place: str) -> None:
    """Have the ranks of the jobs that this process starts forked from the spare at that socket."""
    expand = prepare.expand

    def through_stand_ins(launcher, spec):
        return expand(launcher, dataclasses.replace(spec, program=through_stand_in(Path(place), spec.program)))

    prepare.expand = through_stand_ins


if __name__ == "__main__":
    fork_ranks(sys.argv.pop(1))
    main()
