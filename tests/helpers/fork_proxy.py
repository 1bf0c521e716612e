"""Jobs of this process, and of what it starts, whose ranks are forked by the tests' fork server,
also where `hvdtrain` would start new interpreters.
"""

import contextlib
from dataclasses import replace

from hvdtrain.launch import forked_rank

FIRST = "HVDTRAIN_TESTS_FIRST"  # the variable that has the code which a starter's ranks run first


def through_first(program: list[str], first: str = f"os.environ.get({FIRST!r}, '')") -> list[str]:
    """`python -Pm MODULE …`, which runs some code before that, by default what FIRST has.

    SIGQUIT has it print where each of its threads is.

    Args:
        first: an expression that has the code.
    """
    python, _, *module_with_arguments = program
    code = "; ".join(  # a line: recipes may fill it into scripts
        (
            "import faulthandler, os, runpy, signal, sys",
            "faulthandler.register(signal.SIGQUIT)",
            "module = sys.argv.pop(1)",
            f"exec({first}, {{'__name__': '__main__'}})",
            "runpy.run_module(module, run_name='__main__', alter_sys=True)",
        )
    )
    return [python, "-Pc", code, *module_with_arguments]


def through_proxy(place: str, program: list[str]) -> list[str]:
    """The command that has `python -Pm MODULE …` forked by the server whose socket that is; it
    runs what FIRST has first.
    """
    return forked_rank.forked_program(place, through_first(program))


def fork_ranks(place: str) -> None:
    """Have the ranks of the jobs that this process starts forked by the server at that socket."""
    from hvdtrain.comparing import running
    from hvdtrain.launch import prepare

    expand = prepare.expand

    def through_proxies(launcher, spec):
        # what a scheduler starts begins with `env` and variables
        at = spec.program.index("-Pm") - 1
        program = [*spec.program[:at], *through_proxy(place, spec.program[at:])]
        return expand(launcher, replace(spec, program=program))

    prepare.expand = through_proxies
    running.fork_server = lambda log, meanwhile: contextlib.nullcontext("")
