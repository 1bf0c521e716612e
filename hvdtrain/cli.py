"""The command line. Nothing heavy is imported before a command needs it."""

import gc
import importlib
import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from hvdtrain.base.config.option_types import Several
from hvdtrain.base.config.other_tools import explain_unknown
from hvdtrain.base.errors import Failure, UsageError, unknown
from hvdtrain.base.formatting import shown
from hvdtrain.base.system.memory import importing

# Where each command lives, and what it does: `hvdtrain --help` shows that without importing any of
# them, of which those that compute start with torch.
COMMANDS = {
    "compare": (
        "hvdtrain.comparing.command:compare",
        "Train in several modes, and report which is faster.",
    ),
    "train": (
        "hvdtrain.job.rank.command:train",
        "Train one job, or be one rank of it under a starter.",
    ),
    "run": (
        "hvdtrain.job.rank.command:run",
        "Run your own training script, as one rank or alone.",
    ),
    "launch": ("hvdtrain.launch.commands:launch", "Start workers and servers, here or on hosts."),
    "status": ("hvdtrain.launch.status:status", "Show a job's progress."),
    "stop": ("hvdtrain.launch.commands:stop", "End a launched job, which saves a snapshot."),
    "hosts": ("hvdtrain.launch.testbed:hosts", "Make hosts on this machine, with slow links."),
    "evaluate": ("hvdtrain.tools.evaluate.command:evaluate", "Test the model that a run saved."),
    "report": (
        "hvdtrain.comparing.report_command:report",
        "Compare finished runs: tables, plots, a verdict.",
    ),
    "bench": (
        "hvdtrain.tools.bench.command:bench",
        "Time all-reduce, push and pull by themselves.",
    ),
    "explain": (
        "hvdtrain.reporting.explaining.command:explain",
        "Say who was waited for, and where time went.",
    ),
    "plan": ("hvdtrain.planning.command:plan", "Predict runs on clusters that are not here."),
    "replay": (
        "hvdtrain.tools.checks.replay:replay",
        "Repeat a recorded parameter-server run bit for bit.",
    ),
    "verify": (
        "hvdtrain.tools.checks.verify:verify",
        "Check that the modes compute the same weights.",
    ),
    "data": ("hvdtrain.data.commands:data", "Build, check and pack image folders."),
    "modes": ("hvdtrain.job.rank.command:list_modes", "List the modes, and what each does."),
    "doctor": (
        "hvdtrain.tools.doctor.command:doctor",
        "Check what is installed, and say what to do.",
    ),
}


class Commands(click.Group):
    """Imports a command's module when the command is named."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, attribute = COMMANDS[name][0].split(":")
        with importing():
            return getattr(importlib.import_module(module), attribute)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS:
            raise unknown("command", args[0], list(COMMANDS))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, what) for name, (_, what) in COMMANDS.items()])


@click.group(
    cls=Commands,
    subcommand_metavar="COMMAND [ARGS]",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="hvdtrain")
def cli() -> None:
    """Ring all-reduce or a parameter server? Train the same model on the same samples under both,
    and see.

    \b
    Start here:      hvdtrain compare
    One job:         hvdtrain train --mode single --out runs/one
    Several ranks:   mpirun --bind-to none -np 2 hvdtrain train --mode allreduce --out runs/ring
    With a server:   mpirun --bind-to none -np 3 hvdtrain train --mode ps-async -s 1 --out runs/ps

    In the parameter-server modes the first S ranks serve and the others work. horovodrun, mpirun
    and torchrun all start ranks; `hvdtrain doctor` says what is there. As root, give mpirun
    --allow-run-as-root, or set OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1;
    `hvdtrain launch -n 2` does it for you.
    """


def main() -> NoReturn:
    """Run the command line: 0 done, 1 failed, 2 usage, 130 interrupted; each thing wrong is one
    line on stderr.
    """
    sys.stdout, sys.stderr = shown(sys.stdout), shown(sys.stderr)
    # Plots are files here. A notebook's backend, which its commands inherit, may not be installed.
    os.environ.pop("MPLBACKEND", None)
    try:
        code = cli.main(prog_name="hvdtrain", standalone_mode=False)
        sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else 0)  # a command may return what it found
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        hint = f" (see `{context.command_path} --help`)" if context else ""
        _fail([_clearer(error.format_message(), context) + hint], error.exit_code)
    except (UsageError, Failure) as error:
        _fail(error.args, error.exit_code)
    except (
        OSError
    ) as error:  # whoever read our output has enough of it; else a full disk, most likely
        # What is still buffered goes nowhere: writing it again at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            sys.exit(1)
        _fail([f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"], 1)
    except (KeyboardInterrupt, click.Abort) as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # another one would change the exit code
        how_to_go_on = str(error.__cause__ or "")  # click has made another error of it
        _fail([f"interrupted: {how_to_go_on}" if how_to_go_on else "interrupted"], 130)
    finally:
        # The process ends: to look for garbage among all that torch has made took half a second.
        # But triton's library, where something has loaded it, prints a list of what nobody has
        # freed.
        gc.unfreeze() if "triton" in sys.modules else gc.freeze()


def _clearer(message: str, context: click.Context | None) -> str:
    """What click says, in words that name what to do."""
    option = re.match("No such option '(.*?)'", message)
    if option and context:
        known_elsewhere = explain_unknown(option[1], context.command)
        if known_elsewhere:
            return f"No such option '{option[1]}': {known_elsewhere}"
    message = message.replace("is not a valid float range.", "is not a number.")
    message = message.replace("is not a valid integer range.", "is not a whole number.")
    lists = context and any(isinstance(param.type, Several) for param in context.command.params)
    return (
        f"{message}: numbers and names are listed by commas, `2,4`"
        if lists and "extra argument" in message
        else message
    )


def _fail(problems: Sequence[object], code: int) -> NoReturn:
    for problem in problems:
        # Ranks share a stream: a line is one write, where `print` makes two if PYTHONUNBUFFERED is
        # set.
        sys.stderr.write(f"hvdtrain: {' '.join(str(problem).splitlines())}\n")
    sys.exit(code)
