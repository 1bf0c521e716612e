"""The command line. Nothing heavy is imported before a command needs it."""

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from hvdtrain.errors import Failure, UsageError

# Where each command lives. Those that compute with torch start by importing it: not to show a help page.
COMMANDS = {
    "compare": "hvdtrain.compare.command:compare",
    "train": "hvdtrain.rank.command:train",
    "launch": "hvdtrain.launch.commands:launch",
    "stop": "hvdtrain.launch.commands:stop",
    "hosts": "hvdtrain.launch.testbed_command:hosts",
    "evaluate": "hvdtrain.evaluate.command:evaluate",
    "report": "hvdtrain.report.command:report",
    "bench": "hvdtrain.bench.command:bench",
    "plan": "hvdtrain.plan.command:plan",
    "replay": "hvdtrain.checks.replay:replay",
    "verify": "hvdtrain.checks.verify:verify",
    "data": "hvdtrain.data.commands:data",
    "modes": "hvdtrain.rank.command:list_modes",
    "doctor": "hvdtrain.doctor.command:doctor",
}


class Commands(click.Group):
    """Imports a command's module when the command is named."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, attribute = COMMANDS[name].split(":")
        return getattr(importlib.import_module(module), attribute)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="hvdtrain")
def cli() -> None:
    """Ring all-reduce or a parameter server? Train the same VGG on the same samples under both, and see.

    \b
    Start here:      hvdtrain compare
    One job:         hvdtrain train --mode single --out runs/one
    Several ranks:   mpirun --bind-to none -np 2 hvdtrain train --mode allreduce --out runs/ring
    With a server:   mpirun --bind-to none -np 3 hvdtrain train --mode ps-async --servers 1 --out runs/ps

    In the parameter-server modes the first S ranks serve and the others work. horovodrun, mpirun and
    torchrun all start ranks; `hvdtrain doctor` says what is there.
    """


def main() -> NoReturn:
    """Run the command line: 0 done, 1 failed, 2 usage, 130 interrupted; each thing wrong is one line on stderr."""
    try:
        code = cli.main(prog_name="hvdtrain", standalone_mode=False) or 0
        sys.stdout.flush()
        sys.exit(code)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        hint = f" (see `{context.command_path} --help`)" if context else ""
        _fail([error.format_message() + hint], error.exit_code)
    except UsageError as error:
        _fail(error.args, error.exit_code)
    except Failure as error:
        _fail([str(error)], error.exit_code)
    except BrokenPipeError:  # whoever read our output has enough of it
        _drop_output()
        sys.exit(1)
    except OSError as error:  # a full disk, most likely
        _drop_output()
        _fail([f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"], 1)
    except (KeyboardInterrupt, click.Abort):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # another one would change the exit code
        _fail(["interrupted"], 130)


def _drop_output() -> None:
    """Let what is still buffered go nowhere: writing it again at exit would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(problems: Sequence[object], code: int) -> NoReturn:
    for problem in problems:
        print(f"hvdtrain: {' '.join(str(problem).splitlines())}", file=sys.stderr)
    sys.exit(code)
